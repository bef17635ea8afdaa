// SPDX-License-Identifier: GPL-2.0-only
/*
 * A QEMU plugin that gives a TCG guest slow memory and a sampling unit.
 *
 *   -plugin demeter_lab.so,shm=PATH,fast_mib=F,slow_mib=S,fast_ns=80,slow_ns=250,
 *           plug_mib=0,fast_gbps=100,slow_gbps=20,dilation=8
 *
 * shm        file shared with the guest (shared_page.h); made, sized and emptied here. QEMU gets
 *            it as the memory-backend-file of an ivshmem-plain device. No comma in the path.
 * fast_mib   size of node 0, the fast tier, MiB
 * slow_mib   size of node 1, the slow tier, MiB
 * plug_mib   size of a memory device in each node, MiB; 0 for none
 * *_ns       latency of a load that leaves the caches, nanoseconds
 * *_gbps     bandwidth, 10^9 bytes a second
 * dilation   how many times slower than hardware the emulated CPU is: delays are stretched by it
 *
 * All are required, whole numbers. What the plugin relies on: `-machine pc`; the nodes' memory
 * backends are the first two memory backends on the command line, node 0's first; those of the
 * memory devices come next in the same order, and the devices' addresses are as memory_model.h
 * says. Emulators differ in how they report addresses: the guest shows some pages first (see
 * `asked` in shared_page.h), and until one way fits them all, no miss falls in a tier.
 *
 *   -plugin demeter_lab.so,check=on
 *
 * only ends the emulator, with success: it can load us.
 *
 * While the guest has set `armed`, a load or store that misses the cache filter takes its tier's
 * latency x dilation; or, when it takes the next line of a stream, the time in which its tier
 * transfers a line, x dilation. Stores cost as loads, because they must read the line first.
 *
 * The delay starts at the end of the vCPU's previous miss, so it includes the emulator's own work
 * since then. As long as the emulator is faster than the modelled machine, its noise is invisible.
 * A vCPU that lags by more than SLACK_NS, because it did something else, does not catch up. If it
 * lags by more than LAG_NS_MIN and was not halted, the host did not run it, since no guest runs for
 * so long without a miss. That time is counted as `lag_ns`. A slowdown of the vCPU that does not
 * stop it, such as a lower clock, is not detected.
 *
 * An emulator whose CPUs have a sampling unit gets each miss and its cost, whether `armed` is set or not.
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
#include "qemu_plugin.h"
#include "sample_ring.h"

#define PAGE_BYTES 4096u
#define USER_END (1ull << 47) /* user addresses are below, with four levels of page tables */
#define NS_MAX 1000000u
#define GBPS_MAX 1000000u
#define DILATION_MAX 1000u
#define TIER_MIB_MAX (16u << 20)
#define MISSING UINT64_MAX
/* Short delays accumulate until they are worth two clock readings. */
#define SPIN_NS_MIN 200u
#define SLACK_NS 50000u
#define LAG_NS_MIN 500000u

struct vcpu {
	struct filter filter;
	struct streams streams;
	struct ring_writer ring;
	uint64_t owed_ticks; /* cost of misses that the clock was not read for yet */
	uint64_t due_ticks;  /* when the misses before those are done; 0: not known */
	uint32_t loads_since_sample;
} __attribute__((aligned(64)));

static struct vcpu vcpus[DEMETER_MAX_VCPUS];
static struct tier tiers[2]; /* by node */
static struct layout layouts[REPORTINGS];
static const struct layout *layout; /* the one that fits; NULL while none is known to */
static struct demeter_control *control;
static uint64_t spin_ticks_min, slack_ticks, lag_ticks_min;
static double ns_per_tick;

/* A miss of `ticks`: waits until it is done, now or together with the next ones. */
static void pay(struct vcpu *vcpu, uint64_t ticks)
{
	vcpu->owed_ticks += ticks;
	if (vcpu->owed_ticks < spin_ticks_min)
		return;
	uint64_t now = __rdtsc();
	uint64_t start = now - slack_ticks;
	if (vcpu->due_ticks < start) {
		uint64_t late_ticks = now - vcpu->due_ticks;

		if (vcpu->due_ticks && late_ticks > lag_ticks_min)
			ring_count_lag(&vcpu->ring, (uint64_t)((double)late_ticks * ns_per_tick));
		vcpu->due_ticks = start;
	}
	vcpu->due_ticks += vcpu->owed_ticks;
	vcpu->owed_ticks = 0;
	while (__rdtsc() < vcpu->due_ticks)
		;
}

/* The vCPU was halted, so the time since is not lag. */
static void on_resume(unsigned int index)
{
	vcpus[index].due_ticks = 0;
}
QEMU_PLUGIN_VCPU_CB(on_resume)

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
	const struct layout *known = __atomic_load_n(&layout, __ATOMIC_ACQUIRE);
	const struct range *range = known ? range_at(known, reported) : NULL;
	ring_count_miss(&vcpu->ring, !range);
	if (!range)
		return;

	const struct cost *cost = predicted ? &range->tier->predicted : &range->tier->random;
	if (qemu_plugin_access_cost)
		qemu_plugin_access_cost(gva, range->tier == &tiers[1],
					(uint32_t)(cost->latency_ns / ns_per_tick));
	if (armed && cost->delay)
		pay(vcpu, cost->delay);

	/* The cheapest test comes first, since every line of a stream that is not sampled runs it. */
	if (!period ||
	    cost->latency_ns < __atomic_load_n(&control->threshold_ns, __ATOMIC_RELAXED))
		return;
	if (ip >= USER_END || gva >= USER_END || qemu_plugin_mem_is_store(info))
		return;
	if (++vcpu->loads_since_sample < period)
		return;
	vcpu->loads_since_sample = 0;
	ring_push(&vcpu->ring, &(struct demeter_record){
		.gva = gva,
		.gpa = gpa_in(range, reported),
		.ip = ip,
		.latency_ns = cost->latency_ns,
		.vcpu = index,
	});
}

/*
 * The guest asks about a page: is this access to it, and what fits then? One thread of the guest
 * asks; one that races itself gets a wrong answer and nothing else.
 */
static void answer(uint32_t asked, qemu_plugin_meminfo_t info, uint64_t gva)
{
	uint64_t page_gva = __atomic_load_n(&control->page_gva, __ATOMIC_RELAXED);
	uint64_t page_gpa = __atomic_load_n(&control->page_gpa, __ATOMIC_RELAXED);
	uint32_t node = __atomic_load_n(&control->page_node, __ATOMIC_RELAXED);
	static uint32_t answered, fitting = (1u << REPORTINGS) - 1;
	struct qemu_plugin_hwaddr *hwaddr;

	if (gva - page_gva >= PAGE_BYTES || asked == answered || node > 1 ||
	    !(hwaddr = qemu_plugin_get_hwaddr(info, gva)) || qemu_plugin_hwaddr_is_io(hwaddr))
		return;
	uint64_t reported = qemu_plugin_hwaddr_phys_addr(hwaddr);
	const struct layout *fits = NULL;
	for (unsigned int i = 0; i < REPORTINGS; i++) {
		if (!layout_fits(&layouts[i], page_gpa + (gva - page_gva), &tiers[node], reported))
			fitting &= ~(1u << i);
		if (fitting & 1u << i)
			fits = &layouts[i];
	}
	answered = asked;
	__atomic_store_n(&layout, fits, __ATOMIC_RELEASE);
	__atomic_store_n(&control->fitting, fitting, __ATOMIC_RELAXED);
	__atomic_store_n(&control->page_reported, reported, __ATOMIC_RELAXED);
	__atomic_store_n(&control->answered, asked, __ATOMIC_RELEASE);
}

/* Runs for every access of the guest, so it must be cheap while the plugin is idle. */
static void on_access(unsigned int index, qemu_plugin_meminfo_t info, uint64_t gva, void *ip)
{
	uint32_t armed = __atomic_load_n(&control->armed, __ATOMIC_RELAXED);
	uint32_t period = __atomic_load_n(&control->period, __ATOMIC_RELAXED);

	if (!armed && !period) {
		uint32_t asked = __atomic_load_n(&control->asked, __ATOMIC_ACQUIRE);

		if (asked)
			answer(asked, info, gva);
		/* A sampling unit of the CPU's own may be on at any time. */
		if (!qemu_plugin_access_cost)
			return;
	}
	if (!filter_hit(&vcpus[index].filter, gva))
		miss(index, info, gva, (uint64_t)(uintptr_t)ip, armed, period);
}

static void on_translate(struct qemu_plugin_tb *tb)
{
	for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);

		qemu_plugin_register_vcpu_mem_cb(insn, on_access, QEMU_PLUGIN_CB_NO_REGS,
						 QEMU_PLUGIN_MEM_RW,
						 (void *)(uintptr_t)qemu_plugin_insn_vaddr(insn));
	}
}
QEMU_PLUGIN_TB_TRANS_CB(on_translate)

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
	uint64_t fast_mib, slow_mib, plug_mib, fast_ns, slow_ns, fast_gbps, slow_gbps, dilation;
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
	return true;
}

static void set_costs(const struct arguments *arguments)
{
	double line_bytes = 1 << LINE_SHIFT; /* bytes / (10^9 bytes a second) = nanoseconds */
	double fast_line_ns = line_bytes / (double)arguments->fast_gbps;
	double slow_line_ns = line_bytes / (double)arguments->slow_gbps;
	double ticks_per_ns = measure_ticks_per_ns();
	double stretched = (double)arguments->dilation * ticks_per_ns;

	tiers[0].random = (struct cost){
		.latency_ns = (uint32_t)arguments->fast_ns,
		.delay = (uint64_t)((double)arguments->fast_ns * stretched),
	};
	tiers[0].predicted = (struct cost){
		.latency_ns = (uint32_t)fast_line_ns,
		.delay = (uint64_t)(fast_line_ns * stretched),
	};
	tiers[1].random = (struct cost){
		.latency_ns = (uint32_t)arguments->slow_ns,
		.delay = (uint64_t)((double)arguments->slow_ns * stretched),
	};
	tiers[1].predicted = (struct cost){
		.latency_ns = (uint32_t)slow_line_ns,
		.delay = (uint64_t)(slow_line_ns * stretched),
	};
	spin_ticks_min = (uint64_t)(SPIN_NS_MIN * ticks_per_ns);
	slack_ticks = (uint64_t)(SLACK_NS * ticks_per_ns);
	lag_ticks_min = (uint64_t)(LAG_NS_MIN * ticks_per_ns);
	ns_per_tick = 1 / ticks_per_ns;
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
	control->slow_gpa = tier_gpa(&layouts[AS_GPA], &tiers[1]);
	/* Write the magic last: a reader that sees it sees the rest, too. */
	__atomic_store_n(&control->magic, DEMETER_MAGIC, __ATOMIC_RELEASE);
	for (unsigned int i = 0; i < DEMETER_MAX_VCPUS; i++)
		vcpus[i].ring = ring_writer_at(base, i);
	return true;
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	struct arguments arguments = { 0 };

	if (!info->system_emulation || strcmp(info->target_name, "x86_64")) {
		fprintf(stderr, "demeter_lab: only qemu-system-x86_64 is supported\n");
		return 1;
	}
	if (argc == 1 && !strcmp(argv[0], "check=on"))
		_exit(EXIT_SUCCESS);
	if (info->system.max_vcpus > (int)DEMETER_MAX_VCPUS) {
		fprintf(stderr, "demeter_lab: at most %u vCPUs, not %d\n", DEMETER_MAX_VCPUS,
			info->system.max_vcpus);
		return 1;
	}
	if (!parse(&arguments, argc, argv))
		return 1;
	const struct sizes sizes = {
		.node = { arguments.fast_mib << MIB_SHIFT, arguments.slow_mib << MIB_SHIFT },
		.plug = arguments.plug_mib << MIB_SHIFT,
	};
	for (unsigned int i = 0; i < REPORTINGS; i++)
		layouts[i] = layout_of(&sizes, (enum reporting)i, tiers);
	set_costs(&arguments);
	if (!share(arguments.shm, (unsigned int)info->system.smp_vcpus))
		return 1;
	qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate_cb QEMU_PLUGIN_NO_USERDATA);
	qemu_plugin_register_vcpu_resume_cb(id, on_resume_cb QEMU_PLUGIN_NO_USERDATA);
	return 0;
}
