// SPDX-License-Identifier: GPL-2.0-only
/*
 * A double of the emulator: QEMU's functions that the plugin calls, controlled by its tests. Included
 * behind the plugin's file.
 */

/* The current access, as the emulator would report it. */
static uint64_t reported_address;
static bool is_store;
static qemu_plugin_vcpu_tb_trans_cb_t translate;
static qemu_plugin_vcpu_cb_t resume;

/* The guest's clock, where it is not the host's. */
static int64_t guest_ns = -1;

int64_t qemu_plugin_clock(void)
{
	return guest_ns;
}

void qemu_plugin_wait(uint64_t ns)
{
	guest_ns += (int64_t)ns;
}

/* The last access that the sampling unit got. */
static double last_cost_ns;
static uint64_t last_pc;
static bool last_is_load;

void qemu_plugin_access_cost(uint64_t vaddr, uint64_t pc, bool is_load, bool is_far, uint32_t cycles)
{
	(void)vaddr, (void)is_far;
	last_cost_ns = cycles * ns_per_tick;
	last_pc = pc;
	last_is_load = is_load;
}

/* The model of the TLB that the emulator got, and walks of its page tables: all pages are of one size. */
static const struct qemu_plugin_tlb *tlb_model;
static unsigned int walks, walk_shift = 12;

void qemu_plugin_model_tlb(const struct qemu_plugin_tlb *tlb)
{
	tlb_model = tlb;
}

unsigned int qemu_plugin_walk(uint64_t vaddr, bool *is_global)
{
	walks++;
	*is_global = vaddr >> 63;
	return walk_shift;
}

/* The emulator's calls of what was registered, as its version makes them. */
static void emulator_translates(void)
{
#if QEMU_PLUGIN_API >= 7
	translate(NULL, NULL);
#else
	translate(1, NULL);
#endif
}

static void emulator_resumes(unsigned int vcpu)
{
#if QEMU_PLUGIN_API >= 7
	resume(vcpu, NULL);
#else
	resume(1, vcpu);
#endif
}

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
					   qemu_plugin_vcpu_tb_trans_cb_t cb QEMU_PLUGIN_USERDATA)
{
	(void)id;
#if QEMU_PLUGIN_API >= 7
	(void)userdata;
#endif
	translate = cb;
}

void qemu_plugin_register_vcpu_resume_cb(qemu_plugin_id_t id,
					 qemu_plugin_vcpu_cb_t cb QEMU_PLUGIN_USERDATA)
{
	(void)id;
#if QEMU_PLUGIN_API >= 7
	(void)userdata;
#endif
	resume = cb;
}

void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *insn, qemu_plugin_vcpu_mem_cb_t cb,
				      enum qemu_plugin_cb_flags flags, enum qemu_plugin_mem_rw rw,
				      void *userdata)
{
	(void)insn, (void)flags, (void)rw;
	/* The one instruction of the stub's block makes one access. */
	cb(0, 0, 0x5000000, userdata);
}

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb)
{
	(void)tb;
	return 1;
}

struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index)
{
	(void)tb, (void)index;
	return NULL;
}

uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn)
{
	(void)insn;
	return 0x401000;
}

bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t info)
{
	(void)info;
	return is_store;
}

struct qemu_plugin_hwaddr *qemu_plugin_get_hwaddr(qemu_plugin_meminfo_t info, uint64_t gva)
{
	(void)info, (void)gva;
	return (struct qemu_plugin_hwaddr *)&reported_address;
}

bool qemu_plugin_hwaddr_is_io(const struct qemu_plugin_hwaddr *hwaddr)
{
	(void)hwaddr;
	return false;
}

uint64_t qemu_plugin_hwaddr_phys_addr(const struct qemu_plugin_hwaddr *hwaddr)
{
	return *(const uint64_t *)hwaddr;
}
