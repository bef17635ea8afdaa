// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests of the plugin without an emulator. The plugin's file is included here, and QEMU's functions
 * are those of a double. Exits with 0 on success; aborts with the line of a failed assertion.
 */
#include "demeter_lab.c"
#include "emulator_double.h"

#undef NDEBUG
#include <assert.h>

#define FAST_MIB 300u
#define SLOW_MIB 1000u

static void test_filter(void)
{
	static struct filter filter;
	const uint64_t user = 0x7f0000000000, kernel = 0xffff888000000000;

	assert(!filter_hit(&filter, user) && filter_hit(&filter, user + 63));
	assert(!filter_hit(&filter, user + 64) && filter_hit(&filter, user));
	/* Equal low bits at another address are another line. */
	assert(!filter_hit(&filter, user + (1ull << 40)) && !filter_hit(&filter, kernel));

	/* Copying between huge pages, word by word, misses each line of each side once. */
	unsigned int misses = 0;
	for (uint64_t at = 0; at < 2u << 20; at += 8) {
		misses += !filter_hit(&filter, kernel + (4u << 20) + at);
		misses += !filter_hit(&filter, kernel + (64u << 20) + at);
	}
	assert(misses == 2 * (2u << 20) / 64);
}

static void test_streams(void)
{
	struct streams streams = { 0 };

	/* Two interleaved streams pay the latency once each. */
	unsigned int latencies = 0;
	for (uint64_t i = 0; i < 1000; i++) {
		latencies += !streams_predicted(&streams, 100000 + i);
		latencies += !streams_predicted(&streams, 900000 + i);
	}
	assert(latencies == 2);
	/* Backwards and far away is not predicted. */
	assert(!streams_predicted(&streams, 500000) && !streams_predicted(&streams, 499999));
	/* STREAMS new streams evict all old ones. */
	for (uint64_t i = 0; i < STREAMS; i++)
		assert(!streams_predicted(&streams, 1000 * i + 7000000));
	assert(!streams_predicted(&streams, 101000));
}

/* Two nodes and the memory devices, in MiB, laid out as an emulator reports them. */
static struct layout laid_out(uint64_t fast, uint64_t slow, uint64_t plug, enum reporting reporting)
{
	const struct sizes two = {
		.node_count = 2, .node = { { fast << 20, plug << 20 }, { slow << 20, plug << 20 } },
	};

	return layout_of(&two, reporting);
}

/* The node of an address, in MiB, as the emulator reports it; -1 for none. */
static int node_at(const struct layout *layout, uint64_t reported_mib)
{
	const struct range *range = range_at(layout, reported_mib << 20);

	return range ? (int)range->node : -1;
}

static uint64_t gpa_mib_at(const struct layout *layout, uint64_t reported_mib)
{
	return gpa_in(range_at(layout, reported_mib << 20), reported_mib << 20) >> 20;
}

static void test_layout_as_block(void)
{
	struct layout small = laid_out(300, 1000, 0, AS_BLOCK);

	assert(node_at(&small, 0) == 0 && node_at(&small, 299) == 0);
	/* Node 1 is reported at twice the size of node 0; nothing lies between. */
	assert(node_at(&small, 300) == -1 && node_at(&small, 599) == -1);
	assert(node_at(&small, 600) == 1 && node_at(&small, 1599) == 1);
	assert(node_at(&small, 1600) == -1 && !range_at(&small, UINT64_MAX));
	assert(gpa_mib_at(&small, 600) == 300);

	/* RAM beyond 3 GiB continues at 4 GiB when there is as much as 3.5 GiB. */
	struct layout large = laid_out(1024, 4096, 0, AS_BLOCK);
	assert(gpa_mib_at(&large, 2048) == 1024);
	assert(gpa_mib_at(&large, 4095) == 3071);
	assert(gpa_mib_at(&large, 4096) == 4096);

	/*
	 * Memory devices of 256 MiB: their blocks follow RAM's (1300 and 1556 MiB), and they lie
	 * 384 and 640 MiB into the region that begins at 4 GiB.
	 */
	small = laid_out(300, 1000, 256, AS_BLOCK);
	assert(node_at(&small, 600) == 1 && node_at(&small, 1600) == -1);
	assert(node_at(&small, 1683) == -1 && node_at(&small, 1684) == 0);
	assert(node_at(&small, 1939) == 0 && node_at(&small, 1940) == -1);
	assert(node_at(&small, 2195) == -1 && node_at(&small, 2196) == 1);
	assert(node_at(&small, 2451) == 1 && node_at(&small, 2452) == -1);
	assert(gpa_mib_at(&small, 1684) == 4096 + 384);
	assert(gpa_mib_at(&small, 2196) == 4096 + 640);
	/* RAM above 4 GiB (5 - 3 GiB) comes before them. */
	large = laid_out(1024, 4096, 1024, AS_BLOCK);
	assert(gpa_mib_at(&large, 6 * 1024) == 4096 + 2048 + 1024);
}

/* Whatever the sizes are: the same gPAs in the same nodes, each once, however they are reported. */
static void test_layouts_agree(void)
{
	const uint64_t mibs[][3] = { { 300, 1000, 256 }, { 1024, 4096, 1024 }, { 3500, 1000, 128 },
				     { 3072, 512, 0 }, { 2, 3581, 0 }, { 2, 3582, 0 }, { 5000, 2, 0 } };

	for (size_t n = 0; n < sizeof(mibs) / sizeof(mibs[0]); n++) {
		struct layout gpa = laid_out(mibs[n][0], mibs[n][1], mibs[n][2], AS_GPA);
		struct layout block = laid_out(mibs[n][0], mibs[n][1], mibs[n][2], AS_BLOCK);
		uint64_t bytes[2] = { 0 };

		assert(gpa.range_count == block.range_count);
		for (unsigned int i = 0; i < gpa.range_count; i++) {
			const struct range *range = &gpa.ranges[i], *other = &block.ranges[i];
			uint64_t size = range->end - range->start;

			assert(range->gpa == range->start && other->gpa == range->gpa);
			assert(size && other->end - other->start == size && other->node == range->node);
			assert(range_at(&gpa, range->start) == range && range_at(&gpa, range->end - 1) == range);
			assert(range_at(&block, other->start) == other);
			assert(range_at(&block, other->end - 1) == other);
			/* No RAM lies in the gap below 4 GiB. */
			assert(range->end <= RAM_SPLIT_MIN || range->start >= 4 * GIB);
			bytes[range->node] += size;
		}
		assert(bytes[0] == (mibs[n][0] + mibs[n][2]) << 20);
		assert(bytes[1] == (mibs[n][1] + mibs[n][2]) << 20);
	}
	struct layout both = laid_out(3500, 1000, 0, AS_GPA);
	assert(node_at(&both, 3071) == 0 && node_at(&both, 3072) == -1);
	assert(node_at(&both, 4096) == 0 && node_at(&both, 4096 + 428) == 1);
	assert(node_gpa(&both, 0) == 0 && node_gpa(&both, 1) == (4096ull + 428) << 20);
	assert(node_gpa(&both, 2) == UINT64_MAX);
}

/* Any number of nodes, with and without RAM and devices: each address is of one node, in both ways. */
static void test_layouts_of_many_nodes(void)
{
	const struct sizes many[] = {
		{ .node_count = 4, .node = { { 384u << 20 }, { 384u << 20 }, { 256u << 20 }, { 256u << 20 } } },
		/* CPUs alone in front, and a node that is plugged in at the end. */
		{ .node_count = 4, .node = { { 0 }, { 300u << 20 }, { 1000u << 20 }, { 0, 256u << 20 } } },
		{ .node_count = 3, .node = { { 2048ull << 20 }, { 2048ull << 20 }, { 1024u << 20, 128u << 20 } } },
	};

	for (size_t n = 0; n < sizeof(many) / sizeof(many[0]); n++) {
		struct layout gpa = layout_of(&many[n], AS_GPA), block = layout_of(&many[n], AS_BLOCK);
		uint64_t bytes[NODES_MAX] = { 0 };

		assert(gpa.range_count == block.range_count);
		for (unsigned int i = 0; i < gpa.range_count; i++) {
			const struct range *range = &gpa.ranges[i], *other = &block.ranges[i];

			assert(range_at(&gpa, range->start) == range && range_at(&gpa, range->end - 1) == range);
			assert(range_at(&block, other->start) == other);
			assert(range_at(&block, other->end - 1) == other);
			assert(range->node == other->node && range->gpa == other->gpa);
			bytes[range->node] += range->end - range->start;
		}
		for (unsigned int node = 0; node < many[n].node_count; node++)
			assert(bytes[node] == many[n].node[node].ram + many[n].node[node].plug);
	}
	/* 4 GiB + the 300 MiB before the last RAM, in whole 128 MiB. */
	struct layout late = layout_of(&many[1], AS_GPA);
	assert(node_gpa(&late, 0) == UINT64_MAX && node_gpa(&late, 3) == (4096ull + 384) << 20);
}

static void test_ring(void)
{
	static _Alignas(64) char memory[DEMETER_SHARED_BYTES + 64];
	struct ring_writer ring = ring_writer_at(memory, DEMETER_MAX_VCPUS - 1);
	struct demeter_record record = { 0 };
	const char canary[64] = { 0 };

	for (uint64_t i = 0; i < DEMETER_RING_RECORDS + 10; i++) {
		record.gva = i;
		ring_push(&ring, &record);
	}
	/* Full: the oldest stay, the rest is counted. */
	assert(ring.shared->head == DEMETER_RING_RECORDS && ring.shared->dropped == 10);
	assert(ring.records[0].gva == 0);

	/* Room for two: the next two go in, in order, then it is full again. */
	ring.shared->tail = 2;
	for (uint64_t i = 0; i < 3; i++) {
		record.gva = 70000 + i;
		ring_push(&ring, &record);
	}
	assert(ring.records[0].gva == 70000 && ring.records[1].gva == 70001);
	assert(ring.records[2].gva == 2 && ring.shared->dropped == 11);

	/* A reader that lies about every word makes us drop, not write elsewhere. */
	const uint64_t lies[] = { UINT64_MAX, 1ull << 63, ring.head + 1, ring.head - DEMETER_RING_RECORDS };
	for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
		ring.shared->tail = lies[i];
		ring.shared->head = lies[i];
		ring.shared->dropped = lies[i];
		uint64_t dropped = ring.dropped, head = ring.head;
		ring_push(&ring, &record);
		assert(ring.head == head && ring.dropped == dropped + 1);
		assert(ring.shared->dropped == ring.dropped);
	}
	assert(!memcmp(memory + DEMETER_SHARED_BYTES, canary, sizeof(canary)));
}

static int install(const qemu_info_t *info, const char *shm, const char *last)
{
	char shm_argument[4096];
	char last_argument[64];
	char *argv[] = {
		shm_argument, "node=300:0:80:100:140:50", "node=1000:0:250:20:310:10", last_argument,
	};

	snprintf(shm_argument, sizeof(shm_argument), "shm=%s", shm);
	snprintf(last_argument, sizeof(last_argument), "%s", last);
	return qemu_plugin_install(1, info, sizeof(argv) / sizeof(argv[0]), argv);
}

static void test_refusals(const char *shm)
{
	const qemu_info_t good = {
		.target_name = "x86_64", .system_emulation = true,
		.system = { .smp_vcpus = 2, .max_vcpus = 16 },
	};
	qemu_info_t info = good;

	info.target_name = "aarch64";
	assert(install(&info, shm, "dilation=8"));
	info = good;
	info.system.max_vcpus = 17;
	assert(install(&info, shm, "dilation=8"));
	info = good;
	info.system.smp_vcpus = 3;
	assert(install(&info, shm, "dilation=8"));

	const char *const bad[] = { "dilation=0", "dilation=-1", "dilation=8x", "dilation=", "dilation",
				    "dilation= 8", "dilation=1001", "nonsense=1", "nodes=8", "node=", "node=1",
				    "node=1:0", "node=1:0:80:100", "node=1:0:80:100:140", "node=1:0:80:100:140:50:",
				    "node=1:0:80:100:140:0", "node=1:0:80:100:140:x", "node=1:0:80:100:140:50:9:9" };
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert(install(&good, shm, bad[i]));
	assert(install(&good, "/nowhere/at/all", "dilation=8"));
	assert(!translate);
	assert(!install(&good, shm, "dilation=8"));
	assert(translate && resume && has_unit);
	/* The other tests are of an emulator without a unit. */
	has_unit = false;
	assert(control->magic == DEMETER_MAGIC && control->vcpus == 2 && !control->armed);
	assert(control->node_gpa[0] == 0 && control->node_gpa[1] == (uint64_t)FAST_MIB << 20);
	assert(control->node_gpa[2] == UINT64_MAX);
}

/* The guest shows a page of `node` at `gpa_mib`; the stub emulator reports the chosen address. */
static uint32_t ask(uint32_t node, uint64_t gpa_mib, uint64_t reported_mib)
{
	control->page_gva = 0x7d0000000000;
	control->page_gpa = gpa_mib << 20;
	control->page_node = node;
	control->asked = control->answered + 1;
	reported_address = (reported_mib << 20) + 8;
	on_access(0, 0, control->page_gva + PAGE_BYTES, NULL); /* another page */
	assert(control->answered != control->asked);
	on_access(0, 0, control->page_gva + 8, NULL);
	return control->fitting;
}

/* Needs what test_refusals installed. */
static void test_answers(void)
{
	const struct ring_writer *ring = &vcpus[0].ring;

	/* Nothing is known yet. */
	control->armed = 1;
	on_access(0, 0, 0x7c0000000000, NULL);
	assert(ring->shared->misses == 1 && ring->shared->strays == 1);
	control->armed = 0;
	/* Node 0 is reported alike by all; node 1 tells them apart. */
	assert(ask(0, 10, 10) == (1u << AS_GPA | 1u << AS_BLOCK));
	assert(control->answered == control->asked && control->page_reported == reported_address);
	assert(ask(1, 300, 600) == 1u << AS_BLOCK && layout == &layouts[AS_BLOCK]);
	/* Repeating a request has no effect. */
	reported_address = 0;
	on_access(0, 0, control->page_gva, NULL);
	assert(layout == &layouts[AS_BLOCK]);
	/* A request with an invalid node is ignored. */
	control->page_node = 2;
	control->asked++;
	on_access(0, 0, control->page_gva, NULL);
	assert(control->answered != control->asked && layout == &layouts[AS_BLOCK]);
	control->asked = 0;
}

/* Last: from here on no tier is known. Needs what test_refusals installed. */
static void test_what_fits_no_layout(void)
{
	uint64_t misses = vcpus[0].ring.misses, strays = vcpus[0].ring.strays;

	assert(ask(1, 300, 600) && layout);
	/* In the right tier, but at another gPA: no way of reporting is left, and none comes back. */
	assert(!ask(1, 301, 600) && !layout);
	assert(!ask(1, 300, 600) && !layout);
	control->asked = 0;
	control->armed = 1;
	on_access(0, 0, 0x7c1000000000, NULL);
	assert(vcpus[0].ring.misses == misses + 1 && vcpus[0].ring.strays == strays + 1);
	control->armed = 0;
}

/* Needs what test_answers found out. */
static void test_samples(void)
{
	const struct ring_writer *ring = &vcpus[0].ring;
	const uint64_t user_ip = 0x401000, kernel_ip = 0xffffffff81000000;
	uint64_t gva = 0x7f0000000000;

	control->period = 3;
	control->threshold_ns = 100;
	reported_address = 2 * (uint64_t)FAST_MIB << 20;
	/* Stores, kernel code, kernel data and the fast tier do not count; loads do, each third. */
	for (unsigned int i = 0; i < 30; i++) {
		is_store = true;
		on_access(0, 0, gva += 4096, (void *)user_ip);
		is_store = false;
		on_access(0, 0, gva += 4096, (void *)kernel_ip);
		on_access(0, 0, 0xffff888000000000 | ((gva += 4096) & 0xffffff), (void *)user_ip);
		reported_address = 4096;
		on_access(0, 0, gva += 4096, (void *)user_ip);
		reported_address = 2 * (uint64_t)FAST_MIB << 20;
		on_access(0, 0, gva += 4096, (void *)user_ip);
		on_access(0, 0, gva, (void *)user_ip); /* cached */
	}
	assert(ring->head == 10);
	const struct demeter_record *last = &ring->records[9];
	assert(last->gva == gva && last->gpa == (uint64_t)FAST_MIB << 20 && last->ip == user_ip);
	assert(last->latency_ns == 250 && last->vcpu == 0);

	/* A stream's next line arrives faster than the threshold. */
	for (unsigned int i = 0; i < 30; i++)
		on_access(0, 0, gva += 64, (void *)user_ip);
	assert(ring->head == 10);

	/* A miss outside all tiers is only counted. */
	reported_address = UINT64_MAX;
	uint64_t strays = ring->strays;
	on_access(0, 0, gva += 4096, (void *)user_ip);
	assert(ring->shared->strays == strays + 1 && ring->head == 10);

	/* Translation hooks accesses with the instruction's address. */
	control->period = 1;
	reported_address = 2 * (uint64_t)FAST_MIB << 20;
	emulator_translates();
	assert(ring->head == 11 && ring->records[10].ip == 0x401000);
	control->period = 0;
}

/* A sampling unit hears of each miss, and the loads that it may sample are counted. Needs what test_answers found out. */
static void test_counted_loads(void)
{
	const uint64_t user_ip = 0x401000, kernel_ip = 0xffffffff81000000, start = 0x7d8000000000;
	const uint64_t *counted = &loads->of_block[(start >> 21) % DEMETER_LOADS_BLOCKS];
	uint64_t gva = start;

	has_unit = true;
	reported_address = 2 * (uint64_t)FAST_MIB << 20;
	on_access(0, 0, gva, (void *)user_ip);
	on_access(0, 0, gva, (void *)user_ip); /* cached */
	assert(last_cost_ns > 249 && last_cost_ns < 251 && *counted == 1);
	assert(last_pc == user_ip && last_is_load);
	/* The kernel's, a store, and the next line of a stream do not count. */
	on_access(0, 0, gva += 4096, (void *)kernel_ip);
	assert(last_pc == kernel_ip);
	is_store = true;
	on_access(0, 0, gva += 4096, (void *)user_ip);
	is_store = false;
	assert(last_cost_ns > 249 && !last_is_load);
	on_access(0, 0, gva + 64, (void *)user_ip);
	assert(last_cost_ns < 4 && *counted == 1);
	/* The next block has a count of its own. */
	on_access(0, 0, start + (2u << 20), (void *)user_ip);
	assert(*counted == 1 && counted[1] == 1);
	has_unit = false;
}

/* Needs what test_answers found out. Only lower bounds: a busy machine may take any time. */
static void test_delay(void)
{
	uint64_t gva = 0x7e0000000000;

	control->armed = 1;
	reported_address = 2 * (uint64_t)FAST_MIB << 20;
	uint64_t start_ns = now_ns();
	for (unsigned int i = 0; i < 1000; i++)
		on_access(0, 0, gva += 4096, NULL);
	/* 250 ns x 8 x 1000 = 2 ms, less the slack; a tenth less for the measured clock. */
	assert(now_ns() - start_ns >= 1755000);

	/* The fast tier takes 80 ns x 8. */
	reported_address = 4096;
	uint64_t due_ticks = vcpus[0].due_ticks;
	on_access(0, 0, gva += 4096, NULL);
	assert(vcpus[0].owed_ticks == 0 && vcpus[0].due_ticks >= due_ticks + 3 * spin_ticks_min);
	/* A vCPU that lags far does not catch up: a miss may end early by the slack, not by more. */
	vcpus[0].due_ticks = 0;
	uint64_t start_ticks = __rdtsc();
	on_access(0, 0, gva += 4096, NULL);
	assert(vcpus[0].due_ticks >= start_ticks - slack_ticks);
	/* One line of a slow stream is saved up: 64 bytes / (20 bytes a ns) x 8 = 26 ns. */
	reported_address = 2 * (uint64_t)FAST_MIB << 20;
	on_access(0, 0, gva += 64, NULL);
	assert(vcpus[0].owed_ticks > 0 && vcpus[0].owed_ticks < spin_ticks_min);
	control->armed = 0;
}

/* Each vCPU pays what its socket's way to the node costs. Needs what test_answers found out. */
static void test_sockets(void)
{
	const struct ring_writer *ring = &vcpus[1].ring;

	control->period = 1;
	control->threshold_ns = 0;
	reported_address = 4096;
	on_access(1, 0, 0x7e4000000000, (void *)0x401000);
	assert(ring->head == 1 && ring->records[0].latency_ns == 140 && ring->records[0].vcpu == 1);
	reported_address = 2 * (uint64_t)FAST_MIB << 20;
	on_access(1, 0, 0x7e4000001000, (void *)0x401000);
	assert(ring->head == 2 && ring->records[1].latency_ns == 310);
	control->period = 0;
	for (unsigned int node = 0; node < 2; node++) {
		assert(paths[1][node].random.delay > paths[0][node].random.delay);
		assert(paths[1][node].predicted.delay > paths[0][node].predicted.delay);
	}
}

/* Needs what test_answers found out. */
static void test_lag(void)
{
	const struct ring_writer *ring = &vcpus[1].ring;
	struct vcpu *vcpu = &vcpus[1];
	uint64_t gva = 0x7e8000000000;

	control->armed = 1;
	reported_address = 4096;
	/* The first miss is after nothing. */
	on_access(1, 0, gva += 4096, NULL);
	assert(!ring->shared->lag_ns);
	/* A small lag has other causes; a large one means that the vCPU was stopped. */
	vcpu->due_ticks = __rdtsc() - lag_ticks_min / 2;
	uint64_t before = ring->lag_ns;
	on_access(1, 0, gva += 4096, NULL);
	vcpu->due_ticks = __rdtsc() - 10 * lag_ticks_min;
	on_access(1, 0, gva += 4096, NULL);
	/* A tenth less for the measured clock. */
	assert(ring->lag_ns - before >= 9ull * LAG_NS_MIN && ring->shared->lag_ns == ring->lag_ns);
	/* It was halted, for however long. */
	vcpu->due_ticks = 1;
	before = ring->lag_ns;
	emulator_resumes(1);
	on_access(1, 0, gva += 4096, NULL);
	assert(ring->lag_ns == before && vcpu->due_ticks > 1);
	control->armed = 0;
}

/* The guest's clock is that of a machine that is not stretched. */
static void be_hardware(void)
{
	const struct arguments hardware = {
		.dilation = 1,
		.sockets = 1,
		.from = { { { .ns = 80, .gbps = 100 }, { .ns = 250, .gbps = 20 } } },
	};

	is_model_clock = true;
	guest_ns = 1000000000;
	set_costs(&hardware);
}

/* A delay moves the guest's clock by what the vCPU has not worked meanwhile. */
static void test_model_clock(void)
{
	struct vcpu vcpu = { .ring = vcpus[1].ring };
	uint64_t cost = spin_ticks_min + 1000, lag_ns = vcpu.ring.lag_ns;

	be_hardware();
	vcpu.due_ticks = (uint64_t)guest_ns;
	pay(&vcpu, cost);
	assert(guest_ns == 1000000000 + (int64_t)cost);
	int64_t start_ns = guest_ns;
	guest_ns += WINDOW_NS;
	pay(&vcpu, cost);
	assert(guest_ns == start_ns + (int64_t)cost);
	/* Of a second without a miss little overlaps with the next one. */
	guest_ns = start_ns += 1000000000;
	pay(&vcpu, cost);
	assert(guest_ns == start_ns + (int64_t)(cost - slack_ticks) && vcpu.ring.lag_ns == lag_ns);
	is_model_clock = false;
	guest_ns = -1;
}

/* Accesses one page of `1 << walk_shift` bytes; returns how often the page tables were walked for it. */
static unsigned int walks_of(uint64_t page)
{
	unsigned int before = walks;

	on_access(1, 0, page << walk_shift, NULL);
	return walks - before;
}

/* The emulator leaves accessed bits to us: it asks what the TLB holds, and we walk on a miss. */
static void test_tlb(const char *shm)
{
	const qemu_info_t info = {
		.target_name = "x86_64", .system_emulation = true,
		.system = { .smp_vcpus = 2, .max_vcpus = 16 },
	};
	char shm_argument[4096];
	char *argv[] = { shm_argument, "node=300:0:80:100", "node=1000:0:250:20", "dilation=8",
			 "tlb=16:4:8:4:2:4:128:16:4:4:0" };
	const char *const bad[] = { "", "16:4:8:4:2:4:128:16:4:4", "16:4:8:4:2:4:128:16:4:4:2",
				    "15:4:8:4:2:4:128:16:4:4:0", "16:0:8:4:2:4:128:16:4:4:0",
				    "16:4:8:4:2:4:128:17:4:4:0", "16:4:8:4:2:4:1024:16:4:4:0" };
	const uint64_t kernel = 0xffff888000000000 >> 12;

	assert(!has_tlb);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert(!parse_tlb(bad[i]));
	snprintf(shm_argument, sizeof(shm_argument), "shm=%s", shm);
	sizes = (struct sizes){ 0 };
	assert(!qemu_plugin_install(1, &info, sizeof(argv) / sizeof(argv[0]), argv) && has_tlb);
	has_unit = false;

	/* 2,048 small pages fit the second level, and not one more. */
	for (unsigned int round = 0; round < 2; round++)
		for (unsigned int page = 0; page < 2048; page++)
			assert(walks_of(page) == !round);
	assert(walks_of(2048) == 1 && walks_of(0) == 1 && walks_of(1) == 0);
	assert(tlb_model->holds(1, 0) && tlb_model->holds(1, 4095) && !tlb_model->holds(0, 0));
	assert(!tlb_model->holds(1, 128 << 12)); /* 2048, then 0, replaced the oldest of their set */

	/* An invalidation is of one page, or of all; global pages may stay. */
	tlb_model->forget(1, 5);
	assert(!tlb_model->holds(1, 0) && walks_of(0) == 1 && walks_of(0) == 0);
	assert(walks_of(kernel) == 1);
	tlb_model->forget_all(1, false);
	assert(walks_of(kernel) == 0 && walks_of(0) == 1);
	tlb_model->forget_all(1, true);
	assert(walks_of(kernel) == 1 && walks_of(0) == 1);

	/* A huge page is one entry, whichever part of it is accessed. */
	walk_shift = 21;
	assert(walks_of(77) == 1 && tlb_model->holds(1, (77ull << 21) + 123456));
	on_access(1, 0, (77ull << 21) + 99 * PAGE_BYTES, NULL);
	assert(walks_of(77) == 0);

	/* Of other sizes none is held, and each access walks. */
	walk_shift = 22;
	assert(walks_of(500) == 1 && !tlb_model->holds(1, 500ull << 22));
	walk_shift = 12;
	assert(walks_of(2) == 1 && walks_of(501) == 1 && walks_of(2) == 0);
	has_tlb = false;
}

/* The kernel's copy of 2 MiB, page by page and 8 bytes an iteration. Needs what test_answers found out. */
static void test_copy(void)
{
	const uint64_t direct_map = 0xffff888000000000, slow = (uint64_t)FAST_MIB << 20;
	const unsigned int pages = 512;

	be_hardware();
	emulator_resumes(0);
	control->armed = 1;
	int64_t start_ns = guest_ns;
	for (unsigned int page = 0; page < pages; page++) {
		/* Pages of either node lie anywhere. */
		uint64_t to = page * 37 % pages * 2 * PAGE_BYTES;
		uint64_t from = slow + page * 101 % pages * 2 * PAGE_BYTES;

		for (unsigned int byte = 0; byte < PAGE_BYTES; byte += 8) {
			reported_address = from + byte;
			on_access(0, 0, direct_map + from + byte, NULL);
			reported_address = to + byte;
			on_access(0, 0, direct_map + to + byte, NULL);
			guest_ns++;
		}
	}
	/* Hardware copies 5 to 10 GB a second. Each line's latency would take 10 ms. */
	int64_t copy_ns = guest_ns - start_ns;
	assert(copy_ns > 200000 && copy_ns < 400000);
	control->armed = 0;
	is_model_clock = false;
	guest_ns = -1;
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	test_filter();
	test_streams();
	test_layout_as_block();
	test_layouts_agree();
	test_layouts_of_many_nodes();
	test_ring();
	test_refusals(argv[1]);
	test_answers();
	test_samples();
	test_counted_loads();
	test_delay();
	test_sockets();
	test_lag();
	test_model_clock();
	test_copy();
	test_what_fits_no_layout();
	test_tlb(argv[1]);
	return 0;
}
