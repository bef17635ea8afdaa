/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The part of QEMU's TCG plugin interface that we use, and the differences between its versions.
 * Debian packages no header of it, and it is small.
 *
 * A plugin declares one version, and QEMU loads it if it supports that version.
 * -DQEMU_PLUGIN_API=N selects it at build time:
 *
 *   1   QEMU 4.2 to 8.2
 *
 *   2   QEMU 9.0 to 11.0, which also support newer versions (10.0: up to 4, 10.1: 5), but no older
 *
 *   7   QEMU 11.1: callbacks get userdata, and no plugin id
 *
 * For our use, versions 3 to 6 equal 2, and known versions after 7 equal 7. The result of
 * qemu_plugin_hwaddr_phys_addr depends on the release, not on the version: memory_model.h supports
 * both formats.
 */
#ifndef DEMETER_QEMU_PLUGIN_H
#define DEMETER_QEMU_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef QEMU_PLUGIN_API
#error "choose the version: -DQEMU_PLUGIN_API=1, 2 or 7"
#endif

#define QEMU_PLUGIN_EXPORT __attribute__((visibility("default")))

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_API;

typedef uint64_t qemu_plugin_id_t;
typedef uint32_t qemu_plugin_meminfo_t;

typedef struct {
	const char *target_name;
	struct {
		int min;
		int cur;
	} version;
	bool system_emulation;
	union {
		struct {
			int smp_vcpus;
			int max_vcpus;
		} system;
	};
} qemu_info_t;

enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
/*
 * Only both at once: QEMU 7.2 mixes loads and stores up when they are registered apart (a load's
 * callback is called for stores). A callback asks qemu_plugin_mem_is_store.
 */
enum qemu_plugin_mem_rw { QEMU_PLUGIN_MEM_RW = 3 };

struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_plugin_hwaddr;

typedef void (*qemu_plugin_vcpu_mem_cb_t)(unsigned int vcpu, qemu_plugin_meminfo_t info,
					  uint64_t vaddr, void *userdata);
typedef void (*qemu_plugin_vcpu_udata_cb_t)(unsigned int vcpu, void *userdata);

/*
 * Callbacks that the versions declare differently. Ours take what all versions tell:
 *
 *   static void on_resume(unsigned int vcpu) { .. }
 *   QEMU_PLUGIN_VCPU_CB(on_resume)
 *   ..
 *   qemu_plugin_register_vcpu_resume_cb(id, on_resume_cb QEMU_PLUGIN_NO_USERDATA);
 */
#if QEMU_PLUGIN_API < 7
typedef void (*qemu_plugin_vcpu_tb_trans_cb_t)(qemu_plugin_id_t id, struct qemu_plugin_tb *tb);
typedef void (*qemu_plugin_vcpu_cb_t)(qemu_plugin_id_t id, unsigned int vcpu);
typedef void (*qemu_plugin_udata_cb_t)(qemu_plugin_id_t id, void *userdata);

#define QEMU_PLUGIN_TB_TRANS_CB(function)                                                          \
	static void function##_cb(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)                  \
	{                                                                                          \
		(void)id;                                                                          \
		function(tb);                                                                      \
	}
#define QEMU_PLUGIN_VCPU_CB(function)                                                              \
	static void function##_cb(qemu_plugin_id_t id, unsigned int vcpu)                          \
	{                                                                                          \
		(void)id;                                                                          \
		function(vcpu);                                                                    \
	}
#define QEMU_PLUGIN_ATEXIT_CB(function)                                                            \
	static void function##_cb(qemu_plugin_id_t id, void *userdata)                             \
	{                                                                                          \
		(void)id, (void)userdata;                                                          \
		function();                                                                        \
	}
#define QEMU_PLUGIN_USERDATA /* a parameter of what registers */
#define QEMU_PLUGIN_NO_USERDATA
#else
typedef void (*qemu_plugin_vcpu_tb_trans_cb_t)(struct qemu_plugin_tb *tb, void *userdata);
typedef void (*qemu_plugin_vcpu_cb_t)(unsigned int vcpu, void *userdata);
typedef void (*qemu_plugin_udata_cb_t)(void *userdata);

#define QEMU_PLUGIN_TB_TRANS_CB(function)                                                          \
	static void function##_cb(struct qemu_plugin_tb *tb, void *userdata)                       \
	{                                                                                          \
		(void)userdata;                                                                    \
		function(tb);                                                                      \
	}
#define QEMU_PLUGIN_VCPU_CB(function)                                                              \
	static void function##_cb(unsigned int vcpu, void *userdata)                               \
	{                                                                                          \
		(void)userdata;                                                                    \
		function(vcpu);                                                                    \
	}
#define QEMU_PLUGIN_ATEXIT_CB(function)                                                            \
	static void function##_cb(void *userdata)                                                  \
	{                                                                                          \
		(void)userdata;                                                                    \
		function();                                                                        \
	}
#define QEMU_PLUGIN_USERDATA , void *userdata
#define QEMU_PLUGIN_NO_USERDATA , NULL
#endif

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
					   qemu_plugin_vcpu_tb_trans_cb_t cb QEMU_PLUGIN_USERDATA);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *insn, qemu_plugin_vcpu_mem_cb_t cb,
				      enum qemu_plugin_cb_flags flags, enum qemu_plugin_mem_rw rw,
				      void *userdata);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb, qemu_plugin_vcpu_udata_cb_t cb,
					  enum qemu_plugin_cb_flags flags, void *userdata);
void qemu_plugin_register_vcpu_resume_cb(qemu_plugin_id_t id,
					 qemu_plugin_vcpu_cb_t cb QEMU_PLUGIN_USERDATA);
void qemu_plugin_register_vcpu_exit_cb(qemu_plugin_id_t id,
				       qemu_plugin_vcpu_cb_t cb QEMU_PLUGIN_USERDATA);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, qemu_plugin_udata_cb_t cb, void *userdata);

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);

bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t info);
struct qemu_plugin_hwaddr *qemu_plugin_get_hwaddr(qemu_plugin_meminfo_t info, uint64_t vaddr);
bool qemu_plugin_hwaddr_is_io(const struct qemu_plugin_hwaddr *hwaddr);
uint64_t qemu_plugin_hwaddr_phys_addr(const struct qemu_plugin_hwaddr *hwaddr);

/*
 * Only our own emulator has these (crates/lab/emulator); elsewhere they are NULL. Its sampling unit reports what an
 * access cost. Its clock may count instructions; then a vCPU can wait without time of the host's. The clock is -1
 * where it is the host's. Accessed bits may be left to a plugin's model of the TLB. A walk returns the page's size as a
 * power of two, and 0 where no TLB is to hold it.
 */
struct qemu_plugin_tlb {
	bool (*holds)(unsigned int vcpu, uint64_t vaddr);
	void (*forget)(unsigned int vcpu, uint64_t vaddr);
	void (*forget_all)(unsigned int vcpu, bool with_global);
};

__attribute__((weak)) void qemu_plugin_access_cost(uint64_t vaddr, uint64_t pc, bool is_load, bool is_far,
						   uint32_t cycles);
__attribute__((weak)) int64_t qemu_plugin_clock(void);
__attribute__((weak)) void qemu_plugin_wait(uint64_t ns);
__attribute__((weak)) void qemu_plugin_model_tlb(const struct qemu_plugin_tlb *tlb);
__attribute__((weak)) unsigned int qemu_plugin_walk(uint64_t vaddr, bool *is_global);

#endif
