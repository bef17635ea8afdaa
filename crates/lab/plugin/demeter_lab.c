// SPDX-License-Identifier: GPL-2.0-only
/*
 * A QEMU plugin that gives a TCG guest slow memory and a sampling unit.
 *
 *   -plugin demeter_lab.so,shm=PATH,node=300:0:80:100,node=1000:0:250:20,dilation=8
 *
 * shm        file shared with the guest (shared_page.h); made, sized and emptied here. QEMU gets
 *            it as the memory-backend-file of an ivshmem-plain device. No comma in the path.
 * node       a node, in their order: RAM and memory device in MiB, 0 for none; then latency of a load
 *            that leaves the caches in nanoseconds and bandwidth in 10^9 bytes a second, from the
 *            CPUs of each socket: with two of them node=300:0:80:100:140:40
 * dilation   how many times slower than hardware the emulated CPU is: delays are stretched by it
 *
 * tlb        sets and ways of the TLBs, as in tlb=16:4:8:4:2:4:128:16:4:4:0. The first level has 4 KiB,
 *            2 MiB and 1 GiB pages. The second has the first two together, and 1 GiB pages. The last number
 *            is 1 where the second level holds 4 KiB pages only. Without `tlb` no TLB is modelled.
 *
 * All but the last are required, whole numbers. The first vCPUs belong to the first socket, and each socket has
 * as many. The machine must be `-machine pc`. The nodes' memory backends must be the first memory
 * backends on the command line, node 0's first. Memory devices' backends must follow in the same
 * order. The devices' addresses must be as memory_model.h says. Emulators differ in how they report
 * addresses: the guest shows some pages first (see `asked` in shared_page.h), and until one way fits
 * them all, no miss falls in a node.
 *
 *   -plugin demeter_lab.so,check=on
 *
 * only ends the emulator, with success: it can load us.
 *
 * While the guest has set `armed`, a load or store that misses the cache filter takes its node's
 * latency x dilation. If it takes the next line of a stream, it takes the time in which its node
 * transfers a line, x dilation. Stores cost as loads, because they must read the line first.
 *
 * The delay starts at the end of the vCPU's previous miss, so it includes the emulator's own work
 * since then. As long as the emulator is faster than the modelled machine, its noise is invisible.
 * A vCPU that lags by more than SLACK_NS, because it did something else, does not catch up. If it
 * lags by more than LAG_NS_MIN and was not halted, the host did not run it, since no guest runs for
 * so long without a miss. That time is counted as `lag_ns`. A slowdown of the vCPU that does not
 * stop it, such as a lower clock, is not detected.
 *
 * Where the guest's clock counts instructions (crates/lab/emulator), a delay advances that clock and takes no time of
 * the host's. Then nothing is lag, and work of the modelled CPU is part of a delay for WINDOW_NS x dilation only.
 *
 * An emulator whose CPUs have a sampling unit gets each miss and its cost, whether `armed` is set or not. There the loads
 * of each block are counted, too.
 *
 * Where the emulator lets us (crates/lab/emulator), a page's accessed bit is set when the modelled TLB of its vCPU misses,
 * whether `armed` is set or not. Elsewhere `tlb` says nothing.
 *
 * While `period` is not 0, every period-th load that user code does at a user address, that
 * misses the filter and whose modelled latency is at least `threshold_ns`, becomes a record.
 *
 * Each vCPU has its own filter, streams, TLB and ring, and only its thread touches them.
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
#include "tlb_model.h"

#define PAGE_BYTES 4096u
#define USER_END (1ull << 47) /* user addresses are below, with four levels of page tables */
#define NS_MAX 1000000u
#define GBPS_MAX 1000000u
#define DILATION_MAX 1000u
#define TIER_MIB_MAX (16u << 20)
/* Short delays accumulate until they are worth two clock readings. */
#define SPIN_NS_MIN 200u
#define SLACK_NS 50000u
/* The same of a modelled CPU: what it does out of order while it waits, some hundred instructions. */
#define WINDOW_NS 200u
#define LAG_NS_MIN 500000u

struct vcpu {
	struct filter filter;
	struct streams streams;
	struct tlb tlb;
	struct ring_writer ring;
	uint64_t owed_ticks; /* cost of misses that the clock was not read for yet */
	uint64_t due_ticks;  /* when the misses before those are done; 0: not known */
	uint32_t loads_since_sample;
	const struct path *to; /* by node */
} __attribute__((aligned(64)));

static struct vcpu vcpus[DEMETER_MAX_VCPUS];
static struct sizes sizes;
static struct tlb_sizes tlb_sizes;
static struct path paths[SOCKETS_MAX][NODES_MAX];
static struct layout layouts[REPORTINGS];
static const struct layout *layout; /* the one that fits; NULL while none is known to */
static struct demeter_control *control;
static struct demeter_loads *loads;
static uint64_t spin_ticks_min, slack_ticks, lag_ticks_min;
static double ns_per_tick;
static bool has_unit;       /* the emulator's CPUs sample, and want to know what accesses cost */
static bool has_tlb;        /* accessed bits are ours to set */
static bool is_model_clock; /* a tick is a nanosecond of the guest's, or else of the time-stamp counter */

static uint64_t now_ticks(void)
{
	return is_model_clock ? (uint64_t)qemu_plugin_clock() : __rdtsc();
}

static void wait_until(uint64_t now, uint64_t due)
{
	if (is_model_clock) {
		if (due > now)
			qemu_plugin_wait(due - now);
		return;
	}
	while (__rdtsc() < due)
		;
}

/* A miss of `ticks`: waits until it is done, now or together with the next ones. */
static void pay(struct vcpu *vcpu, uint64_t ticks)
{
	vcpu->owed_ticks += ticks;
	if (vcpu->owed_ticks < spin_ticks_min)
		return;
	uint64_t now = now_ticks();
	uint64_t start = now - slack_ticks;
	if (vcpu->due_ticks < start) {
		uint64_t late_ticks = now - vcpu->due_ticks;

		if (!is_model_clock && vcpu->due_ticks && late_ticks > lag_ticks_min)
			ring_count_lag(&vcpu->ring, (uint64_t)((double)late_ticks * ns_per_tick));
		vcpu->due_ticks = start;
	}
	vcpu->due_ticks += vcpu->owed_ticks;
	vcpu->owed_ticks = 0;
	wait_until(now, vcpu->due_ticks);
}

/* The vCPU was halted, so the time since is not lag. */
static void on_resume(unsigned int index)
{
	vcpus[index].due_ticks = 0;
}
QEMU_PLUGIN_VCPU_CB(on_resume)

/* Whether user code loads from a user address. */
static bool is_user_load(qemu_plugin_meminfo_t info, uint64_t gva, uint64_t ip)
{
	return ip < USER_END && gva < USER_END && !qemu_plugin_mem_is_store(info);
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
	const struct layout *known = __atomic_load_n(&layout, __ATOMIC_ACQUIRE);
	const struct range *range = known ? range_at(known, reported) : NULL;
	/* Before the guest has shown its pages no miss falls in a tier. */
	if (armed || period)
		ring_count_miss(&vcpu->ring, !range);
	if (!range)
		return;

	const struct path *path = &vcpu->to[range->node];
	const struct cost *cost = predicted ? &path->predicted : &path->random;
	if (has_unit) {
		qemu_plugin_access_cost(gva, ip, !qemu_plugin_mem_is_store(info), range->node != 0,
					(uint32_t)(cost->latency_ns / ns_per_tick));
		if (!predicted && is_user_load(info, gva, ip))
			__atomic_fetch_add(&loads->of_block[(gva >> DEMETER_LOADS_BLOCK_SHIFT) %
							    DEMETER_LOADS_BLOCKS],
					   1, __ATOMIC_RELAXED);
	}
	if (armed && cost->delay)
		pay(vcpu, cost->delay);

	/* The cheapest test comes first, since every line of a stream that is not sampled runs it. */
	if (!period ||
	    cost->latency_ns < __atomic_load_n(&control->threshold_ns, __ATOMIC_RELAXED))
		return;
	if (!is_user_load(info, gva, ip))
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

	if (gva - page_gva >= PAGE_BYTES || asked == answered || node >= sizes.node_count ||
	    !(hwaddr = qemu_plugin_get_hwaddr(info, gva)) || qemu_plugin_hwaddr_is_io(hwaddr))
		return;
	uint64_t reported = qemu_plugin_hwaddr_phys_addr(hwaddr);
	const struct layout *fits = NULL;
	for (unsigned int i = 0; i < REPORTINGS; i++) {
		if (!layout_fits(&layouts[i], page_gpa + (gva - page_gva), node, reported))
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

/* The emulator sets accessed bits of what the TLB does not hold, and tells of invalidations. */
static bool on_holds(unsigned int index, uint64_t gva)
{
	return tlb_holds(&vcpus[index].tlb, &tlb_sizes, gva);
}

static void on_forget(unsigned int index, uint64_t gva)
{
	tlb_forget(&vcpus[index].tlb, &tlb_sizes, gva);
}

static void on_forget_all(unsigned int index, bool with_global)
{
	tlb_forget_all(&vcpus[index].tlb, &tlb_sizes, with_global);
}

/* An access to another page than the last of its set. Apart from what each access runs. */
__attribute__((noinline)) static void translate_access(struct vcpu *vcpu, uint64_t gva)
{
	bool is_global;

	if (tlb_hit(&vcpu->tlb, &tlb_sizes, gva))
		return;
	unsigned int shift = qemu_plugin_walk(gva, &is_global);
	if (shift)
		tlb_enter(&vcpu->tlb, &tlb_sizes, gva, shift, is_global);
}

/* Runs for every access of the guest, so it must be cheap while the plugin is idle. */
static void on_access(unsigned int index, qemu_plugin_meminfo_t info, uint64_t gva, void *ip)
{
	uint32_t armed = __atomic_load_n(&control->armed, __ATOMIC_RELAXED);
	uint32_t period = __atomic_load_n(&control->period, __ATOMIC_RELAXED);

	if (has_tlb && !tlb_hit_fast(&vcpus[index].tlb, &tlb_sizes, gva))
		translate_access(&vcpus[index], gva);
	if (!armed && !period) {
		uint32_t asked = __atomic_load_n(&control->asked, __ATOMIC_ACQUIRE);

		if (asked)
			answer(asked, info, gva);
		/* A sampling unit of the CPU's own may be on at any time. */
		if (!has_unit)
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
	uint64_t dilation;
	unsigned int sockets;
	bool has_tlb;
	struct {
		uint64_t ns, gbps;
	} from[SOCKETS_MAX][NODES_MAX];
};

/* A whole number within bounds that ends at `end`; moves behind that. */
static bool take_number(const char **text, char end, uint64_t min, uint64_t max, uint64_t *number)
{
	char *behind;

	errno = 0;
	*number = strtoull(*text, &behind, 10);
	if (errno || **text < '0' || **text > '9' || *behind != end || *number < min || *number > max)
		return false;
	*text = behind + (end != '\0');
	return true;
}

/* The next node: its sizes, then a latency and a bandwidth for each socket. */
static bool parse_node(struct arguments *arguments, const char *text)
{
	unsigned int node = sizes.node_count, sockets = 0;
	uint64_t ram_mib, plug_mib;

	if (node == NODES_MAX || !take_number(&text, ':', 0, TIER_MIB_MAX, &ram_mib) ||
	    !take_number(&text, ':', 0, TIER_MIB_MAX, &plug_mib))
		return false;
	for (bool is_last = false; !is_last; sockets++) {
		uint64_t ns, gbps;

		if (sockets == SOCKETS_MAX || !take_number(&text, ':', 1, NS_MAX, &ns))
			return false;
		is_last = !strchr(text, ':');
		if (!take_number(&text, is_last ? '\0' : ':', 1, GBPS_MAX, &gbps))
			return false;
		arguments->from[sockets][node].ns = ns;
		arguments->from[sockets][node].gbps = gbps;
	}
	if (node && sockets != arguments->sockets)
		return false;
	arguments->sockets = sockets;
	sizes.node[node].ram = ram_mib << MIB_SHIFT;
	sizes.node[node].plug = plug_mib << MIB_SHIFT;
	sizes.node_count++;
	return true;
}

/* Sets and ways of all arrays, then whether the second level holds small pages only. */
static bool parse_tlb(const char *text)
{
	uint64_t sets, ways, is_small;

	for (unsigned int array = 0; array < TLB_ARRAYS; array++) {
		if (!take_number(&text, ':', 1, TLB_SETS_MAX, &sets) ||
		    !take_number(&text, ':', 1, TLB_WAYS_MAX, &ways))
			return false;
		tlb_sizes.of[array] = (struct tlb_geometry){ .sets = (uint32_t)sets, .ways = (uint32_t)ways };
		if (!tlb_geometry_is_sound(tlb_sizes.of[array]))
			return false;
	}
	if (!take_number(&text, '\0', 0, 1, &is_small))
		return false;
	tlb_sizes.is_second_small = is_small;
	return true;
}

/* Reads key=value arguments. */
static bool parse(struct arguments *arguments, int argc, char **argv)
{
	for (int i = 0; i < argc; i++) {
		const char *equals = strchr(argv[i], '=');
		const char *value = equals ? equals + 1 : "";
		size_t length = equals ? (size_t)(equals - argv[i]) : 0;

		if (length == 3 && !strncmp(argv[i], "shm", 3)) {
			arguments->shm = value;
		} else if (length == 4 && !strncmp(argv[i], "node", 4)) {
			if (!parse_node(arguments, value)) {
				fprintf(stderr, "demeter_lab: %s: needs RAM:DEVICE:NS:GBPS in whole numbers, NS:GBPS "
					"for each socket, and at most %u nodes\n", argv[i], NODES_MAX);
				return false;
			}
		} else if (length == 3 && !strncmp(argv[i], "tlb", 3)) {
			if (!parse_tlb(value)) {
				fprintf(stderr, "demeter_lab: %s: needs SETS:WAYS of %u arrays, then 0 or 1; at most %u "
					"sets, a power of two, and %u ways\n", argv[i], TLB_ARRAYS, TLB_SETS_MAX,
					TLB_WAYS_MAX);
				return false;
			}
			arguments->has_tlb = true;
		} else if (length == 8 && !strncmp(argv[i], "dilation", 8)) {
			if (!take_number(&value, '\0', 1, DILATION_MAX, &arguments->dilation)) {
				fprintf(stderr, "demeter_lab: %s: needs a whole number from 1 to %u\n", argv[i],
					DILATION_MAX);
				return false;
			}
		} else {
			fprintf(stderr, "demeter_lab: unknown argument '%s'\n", argv[i]);
			return false;
		}
	}
	if (!arguments->shm || !arguments->dilation || !sizes.node_count) {
		fprintf(stderr, "demeter_lab: shm=PATH, node=... or dilation=NUMBER is missing\n");
		return false;
	}
	return true;
}

static void set_costs(const struct arguments *arguments)
{
	double line_bytes = 1 << LINE_SHIFT; /* bytes / (10^9 bytes a second) = nanoseconds */
	double ticks_per_ns = is_model_clock ? 1 : measure_ticks_per_ns();
	double stretched = (double)arguments->dilation * ticks_per_ns;

	for (unsigned int socket = 0; socket < arguments->sockets; socket++) {
		for (unsigned int node = 0; node < sizes.node_count; node++) {
			double ns = (double)arguments->from[socket][node].ns;
			double line_ns = line_bytes / (double)arguments->from[socket][node].gbps;

			paths[socket][node] = (struct path){
				.random = { .latency_ns = (uint32_t)ns, .delay = (uint64_t)(ns * stretched) },
				.predicted = { .latency_ns = (uint32_t)line_ns,
					       .delay = (uint64_t)(line_ns * stretched) },
			};
		}
	}
	spin_ticks_min = (uint64_t)(SPIN_NS_MIN * ticks_per_ns);
	slack_ticks = is_model_clock ? WINDOW_NS * arguments->dilation :
				       (uint64_t)(SLACK_NS * ticks_per_ns);
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
	loads = (struct demeter_loads *)((char *)base + DEMETER_LOADS_OFFSET);
	control->version = DEMETER_VERSION;
	control->vcpus = vcpu_count;
	control->ring_records = DEMETER_RING_RECORDS;
	for (unsigned int node = 0; node < DEMETER_MAX_NODES; node++)
		control->node_gpa[node] = node_gpa(&layouts[AS_GPA], node);
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
	has_unit = qemu_plugin_access_cost;
	is_model_clock = qemu_plugin_clock && qemu_plugin_clock() >= 0;
	sizes = (struct sizes){ 0 };
	if (!parse(&arguments, argc, argv))
		return 1;
	unsigned int vcpu_count = (unsigned int)info->system.smp_vcpus;
	if (vcpu_count % arguments.sockets) {
		fprintf(stderr, "demeter_lab: %u vCPUs cannot be shared evenly by %u sockets\n", vcpu_count,
			arguments.sockets);
		return 1;
	}
	for (unsigned int i = 0; i < REPORTINGS; i++)
		layouts[i] = layout_of(&sizes, (enum reporting)i);
	set_costs(&arguments);
	for (unsigned int i = 0; i < DEMETER_MAX_VCPUS; i++)
		vcpus[i].to = paths[i < vcpu_count ? i * arguments.sockets / vcpu_count : 0];
	if (!share(arguments.shm, vcpu_count))
		return 1;
	has_tlb = arguments.has_tlb && qemu_plugin_model_tlb;
	if (has_tlb) {
		static const struct qemu_plugin_tlb model = {
			.holds = on_holds, .forget = on_forget, .forget_all = on_forget_all,
		};

		qemu_plugin_model_tlb(&model);
	}
	qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate_cb QEMU_PLUGIN_NO_USERDATA);
	qemu_plugin_register_vcpu_resume_cb(id, on_resume_cb QEMU_PLUGIN_NO_USERDATA);
	return 0;
}
