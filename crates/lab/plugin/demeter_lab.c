// SPDX-License-Identifier: GPL-2.0-only
/*
 * A QEMU plugin that gives a TCG guest slow memory and a sampling unit.
 *
 *   -plugin demeter_lab.so,shm=PATH,fast_mib=F,slow_mib=S,fast_ns=80,slow_ns=250,
 *           plug_mib=0,hidden_ns=80,fast_gbps=100,slow_gbps=20,dilation=8
 *
 * shm        file shared with the guest (shared_page.h); made, sized and emptied here. QEMU gets
 *            it as the memory-backend-file of an ivshmem-plain device. No comma in the path.
 * fast_mib   size of node 0, the fast tier, MiB
 * slow_mib   size of node 1, the slow tier, MiB
 * plug_mib   size of a memory device in each node, MiB; 0 for none
 * *_ns       latency of a load that leaves the caches, nanoseconds
 * hidden_ns  part of a latency that the emulator's own slowness stands for, at most fast_ns; with
 *            fast_ns the fast tier is not delayed at all, less damps the emulator's own noise
 * *_gbps     bandwidth, 10^9 bytes a second
 * dilation   how many times slower than hardware the emulated CPU is: delays are stretched by it
 *
 * All are required, whole numbers. What the plugin relies on: `-machine pc`; the nodes' memory
 * backends are the first two memory backends on the command line, node 0's first; those of the
 * memory devices come next in the same order, and the devices' addresses are as memory_model.h
 * says.
 *
 * While the guest has set `armed`, a load or store that misses the cache filter is delayed by
 * (its tier's latency - hidden_ns) x dilation; or, when it takes the next line of a stream, by
 * the time that its tier takes beyond the fast one to transfer a line, x dilation. Stores cost as
 * loads, because they must read the line first.
 *
 * While `period` is not 0, every period-th load that user code does at a user address, that
 * misses the filter and whose modelled latency is at least `threshold_ns`, becomes a record.
 *
 * Each vCPU has its own filter, streams and ring, and only its thread touches them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#include "memory_model.h"
#include "qemu_plugin_v1.h"
#include "sample_ring.h"

#define EXPORT __attribute__((visibility("default")))
#define USER_END (1ull << 47) /* user addresses are below, with four levels of page tables */
#define NS_MAX 1000000u
#define GBPS_MAX 1000000u
#define DILATION_MAX 1000u
#define TIER_MIB_MAX (16u << 20)
#define MISSING UINT64_MAX
/* Short delays are saved up until they are worth two readings of the clock. */
#define SPIN_NS_MIN 200u

EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

struct vcpu {
	struct filter filter;
	struct streams streams;
	struct ring_writer ring;
	uint64_t owed_ticks;
	uint32_t loads_since_sample;
	uint64_t misses;
	uint64_t strays; /* misses that fell in no tier */
} __attribute__((aligned(64)));

static struct vcpu vcpus[DEMETER_MAX_VCPUS];
static struct machine machine;
static struct demeter_control *control;
static uint64_t spin_ticks_min;

/* Lets `ticks` pass, now or together with the next ones. */
static void pay(struct vcpu *vcpu, uint64_t ticks)
{
	vcpu->owed_ticks += ticks;
	if (vcpu->owed_ticks < spin_ticks_min)
		return;
	uint64_t start = __rdtsc();
	while (__rdtsc() - start < vcpu->owed_ticks)
		;
	vcpu->owed_ticks = 0;
}

/* An access of the instruction at `ip` missed the filter. */
static void miss(unsigned int index, qemu_plugin_meminfo_t info, uint64_t gva, uint64_t ip,
		 uint32_t armed, uint32_t period)
{
	struct vcpu *vcpu = &vcpus[index];
	bool predicted = streams_predicted(&vcpu->streams, gva >> LINE_SHIFT);

	struct qemu_plugin_hwaddr *hwaddr = qemu_plugin_get_hwaddr(info, gva);
	if (!hwaddr || qemu_plugin_hwaddr_is_io(hwaddr))
		return;
	uint64_t reported = qemu_plugin_hwaddr_phys_addr(hwaddr);
	const struct range *range = machine_range(&machine, reported);
	vcpu->misses++;
	if (!range) {
		vcpu->strays++;
		return;
	}

	const struct cost *cost = predicted ? &range->tier->predicted : &range->tier->random;
	if (armed && cost->delay)
		pay(vcpu, cost->delay);

	bool by_user = ip < USER_END && gva < USER_END;
	if (!period || !by_user || qemu_plugin_mem_is_store(info) ||
	    cost->latency_ns < __atomic_load_n(&control->threshold_ns, __ATOMIC_RELAXED))
		return;
	if (++vcpu->loads_since_sample < period)
		return;
	vcpu->loads_since_sample = 0;
	ring_push(&vcpu->ring, &(struct demeter_record){
		.gva = gva,
		.gpa = machine_gpa(&machine, range, reported),
		.ip = ip,
		.latency_ns = cost->latency_ns,
		.vcpu = index,
	});
}

/* Runs for every access of the guest: an idle plugin must cost next to nothing. */
static void on_access(unsigned int index, qemu_plugin_meminfo_t info, uint64_t gva, void *ip)
{
	uint32_t armed = __atomic_load_n(&control->armed, __ATOMIC_RELAXED);
	uint32_t period = __atomic_load_n(&control->period, __ATOMIC_RELAXED);

	if (!armed && !period)
		return;
	if (!filter_hit(&vcpus[index].filter, gva))
		miss(index, info, gva, (uint64_t)(uintptr_t)ip, armed, period);
}

/*
 * One callback for loads and stores, which asks on a miss what it is: QEMU 7.2 mixes the two up
 * when they are registered apart (a load's callback is called for stores).
 */
static void on_translate(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	(void)id;
	for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);

		qemu_plugin_register_vcpu_mem_cb(insn, on_access, QEMU_PLUGIN_CB_NO_REGS,
						 QEMU_PLUGIN_MEM_RW,
						 (void *)(uintptr_t)qemu_plugin_insn_vaddr(insn));
	}
}

/* Says it when the machine is not laid out as we were told. */
static void on_exit_check(qemu_plugin_id_t id, void *unused)
{
	uint64_t misses = 0, strays = 0;

	(void)id;
	(void)unused;
	for (unsigned int i = 0; i < DEMETER_MAX_VCPUS; i++) {
		misses += vcpus[i].misses;
		strays += vcpus[i].strays;
	}
	if (strays > misses / 10)
		fprintf(stderr, "demeter_lab: %" PRIu64 " of %" PRIu64 " cache misses fell in no tier: "
			"fast_mib, slow_mib or the order of the memory backends do not fit this machine\n",
			strays, misses);
}

static uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Ticks of the time-stamp counter in a nanosecond. */
static double measure_ticks_per_ns(void)
{
	uint64_t start_ns = now_ns(), start_ticks = __rdtsc(), end_ns;

	do
		end_ns = now_ns();
	while (end_ns - start_ns < 20000000u);
	return (double)(__rdtsc() - start_ticks) / (double)(end_ns - start_ns);
}

struct arguments {
	const char *shm;
	uint64_t fast_mib, slow_mib, plug_mib, fast_ns, slow_ns, hidden_ns, fast_gbps, slow_gbps, dilation;
};

/* Reads key=value arguments; all keys are required. */
static bool parse(struct arguments *arguments, int argc, char **argv)
{
	const struct {
		const char *key;
		uint64_t *value;
		uint64_t min, max;
	} numbers[] = {
		{ "fast_mib", &arguments->fast_mib, 1, TIER_MIB_MAX },
		{ "slow_mib", &arguments->slow_mib, 1, TIER_MIB_MAX },
		{ "plug_mib", &arguments->plug_mib, 0, TIER_MIB_MAX },
		{ "fast_ns", &arguments->fast_ns, 1, NS_MAX },
		{ "slow_ns", &arguments->slow_ns, 1, NS_MAX },
		{ "hidden_ns", &arguments->hidden_ns, 0, NS_MAX },
		{ "fast_gbps", &arguments->fast_gbps, 1, GBPS_MAX },
		{ "slow_gbps", &arguments->slow_gbps, 1, GBPS_MAX },
		{ "dilation", &arguments->dilation, 1, DILATION_MAX },
	};
	const size_t count = sizeof(numbers) / sizeof(numbers[0]);

	for (size_t n = 0; n < count; n++)
		*numbers[n].value = MISSING;
	for (int i = 0; i < argc; i++) {
		const char *value = strchr(argv[i], '=');
		size_t length = value ? (size_t)(value - argv[i]) : 0;
		size_t n = 0;

		if (length == 3 && !strncmp(argv[i], "shm", 3)) {
			arguments->shm = value + 1;
			continue;
		}
		while (n < count && !(strlen(numbers[n].key) == length &&
				      !strncmp(argv[i], numbers[n].key, length)))
			n++;
		if (n == count) {
			fprintf(stderr, "demeter_lab: unknown argument '%s'\n", argv[i]);
			return false;
		}
		char *end;
		errno = 0;
		unsigned long long number = strtoull(value + 1, &end, 10);
		if (errno || value[1] < '0' || value[1] > '9' || *end ||
		    number < numbers[n].min || number > numbers[n].max) {
			fprintf(stderr, "demeter_lab: %s: needs a whole number from %" PRIu64 " to %"
				PRIu64 "\n", argv[i], numbers[n].min, numbers[n].max);
			return false;
		}
		*numbers[n].value = number;
	}
	if (!arguments->shm) {
		fprintf(stderr, "demeter_lab: shm=PATH is missing\n");
		return false;
	}
	for (size_t n = 0; n < count; n++) {
		if (*numbers[n].value == MISSING) {
			fprintf(stderr, "demeter_lab: %s=NUMBER is missing\n", numbers[n].key);
			return false;
		}
	}
	if (arguments->slow_ns < arguments->fast_ns || arguments->slow_gbps > arguments->fast_gbps) {
		fprintf(stderr, "demeter_lab: the slow tier must not be faster than the fast one\n");
		return false;
	}
	if (arguments->hidden_ns > arguments->fast_ns) {
		fprintf(stderr, "demeter_lab: hidden_ns must be at most fast_ns\n");
		return false;
	}
	return true;
}

static void set_costs(const struct arguments *arguments)
{
	double line_bytes = 1 << LINE_SHIFT; /* bytes / (10^9 bytes a second) = nanoseconds */
	double fast_line_ns = line_bytes / (double)arguments->fast_gbps;
	double slow_line_ns = line_bytes / (double)arguments->slow_gbps;
	double ticks_per_ns = measure_ticks_per_ns();
	double stretched = (double)arguments->dilation * ticks_per_ns;
	double hidden_ns = (double)arguments->hidden_ns;

	machine.fast.random = (struct cost){
		.latency_ns = (uint32_t)arguments->fast_ns,
		.delay = (uint64_t)(((double)arguments->fast_ns - hidden_ns) * stretched),
	};
	machine.fast.predicted = (struct cost){ .latency_ns = (uint32_t)fast_line_ns };
	machine.slow.random = (struct cost){
		.latency_ns = (uint32_t)arguments->slow_ns,
		.delay = (uint64_t)(((double)arguments->slow_ns - hidden_ns) * stretched),
	};
	machine.slow.predicted = (struct cost){
		.latency_ns = (uint32_t)slow_line_ns,
		.delay = (uint64_t)((slow_line_ns - fast_line_ns) * stretched),
	};
	spin_ticks_min = (uint64_t)(SPIN_NS_MIN * ticks_per_ns);
}

/* Makes the shared file, empty but for its header, and the rings' writers. */
static bool share(const char *path, unsigned int vcpu_count)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	if (fd < 0 || ftruncate(fd, DEMETER_SHARED_BYTES)) {
		fprintf(stderr, "demeter_lab: cannot make %s: %s\n", path, strerror(errno));
		if (fd >= 0)
			close(fd);
		return false;
	}
	void *base = mmap(NULL, DEMETER_SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (base == MAP_FAILED) {
		fprintf(stderr, "demeter_lab: cannot map %s: %s\n", path, strerror(errno));
		return false;
	}
	control = base;
	control->version = DEMETER_VERSION;
	control->vcpus = vcpu_count;
	control->ring_records = DEMETER_RING_RECORDS;
	/* The magic last: who sees it sees the rest. */
	__atomic_store_n(&control->magic, DEMETER_MAGIC, __ATOMIC_RELEASE);
	for (unsigned int i = 0; i < DEMETER_MAX_VCPUS; i++)
		vcpus[i].ring = ring_writer_at(base, i);
	return true;
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv)
{
	struct arguments arguments = { 0 };

	if (info->version.min > QEMU_PLUGIN_VERSION || info->version.cur < QEMU_PLUGIN_VERSION) {
		fprintf(stderr, "demeter_lab: this QEMU speaks plugin API %d to %d, we speak %d: "
			"use QEMU 7.2\n", info->version.min, info->version.cur, QEMU_PLUGIN_VERSION);
		return 1;
	}
	if (!info->system_emulation || strcmp(info->target_name, "x86_64")) {
		fprintf(stderr, "demeter_lab: only qemu-system-x86_64 is supported\n");
		return 1;
	}
	if (info->system.max_vcpus > (int)DEMETER_MAX_VCPUS) {
		fprintf(stderr, "demeter_lab: at most %u vCPUs, not %d\n", DEMETER_MAX_VCPUS,
			info->system.max_vcpus);
		return 1;
	}
	if (!parse(&arguments, argc, argv))
		return 1;
	machine_layout(&machine, arguments.fast_mib << MIB_SHIFT, arguments.slow_mib << MIB_SHIFT,
		       arguments.plug_mib << MIB_SHIFT);
	set_costs(&arguments);
	if (!share(arguments.shm, (unsigned int)info->system.smp_vcpus))
		return 1;
	qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
	qemu_plugin_register_atexit_cb(id, on_exit_check, NULL);
	return 0;
}
