/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The modelled memory: which accesses leave the caches, in which tier they land, what they cost.
 * Pure: no emulator, no clock, no shared memory.
 */
#ifndef DEMETER_MEMORY_MODEL_H
#define DEMETER_MEMORY_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LINE_SHIFT 6 /* lines of 64 bytes */
#define MIB_SHIFT 20

/*
 * The cache filter of one vCPU: 16 K direct-mapped lines, 1 MiB.
 *
 * It is looked up by gVA, because the emulator gives the gVA for nothing and the gPA only for a
 * walk through its own structures: a hit must stay as cheap as it can be. What that costs in
 * truth: a line of another process at the same gVA passes for a hit until it is replaced, and a
 * line that is seen through two addresses is cached twice.
 */
#define FILTER_LINES (1u << (MIB_SHIFT - LINE_SHIFT))

struct filter {
	uint32_t tag[FILTER_LINES]; /* 0 = empty: nobody's data lies in the first MiB of a gVA space */
};

/* Whether the line was cached; afterwards it is. */
static inline bool filter_hit(struct filter *filter, uint64_t gva)
{
	/* Bits 20 to 51: enough to tell user from kernel addresses and any two addresses of 48 bits. */
	uint32_t tag = (uint32_t)(gva >> MIB_SHIFT);
	/*
	 * The tag is folded in: else the two sides of a huge page's copy, which differ by a multiple
	 * of 2 MiB, would evict each other all the way.
	 */
	uint32_t *slot = &filter->tag[((gva >> LINE_SHIFT) ^ tag) % FILTER_LINES];

	if (*slot == tag)
		return true;
	*slot = tag;
	return false;
}

/*
 * The streams that the hardware's prefetchers of one vCPU follow. A miss on the line that comes
 * next in a stream finds its data on the way: it pays for bandwidth, not for latency. So does a
 * second miss on the stream's last line, which the small filter may cause but a real cache would
 * not. Any other miss pays the latency, and begins a stream in the place of the oldest.
 */
#define STREAMS 8u

struct streams {
	uint64_t last_line[STREAMS];
	unsigned int oldest;
};

/* Whether a stream predicted the miss on `line`. */
static inline bool streams_predicted(struct streams *streams, uint64_t line)
{
	for (unsigned int i = 0; i < STREAMS; i++) {
		if (line - streams->last_line[i] <= 1) {
			streams->last_line[i] = line;
			return true;
		}
	}
	streams->last_line[streams->oldest] = line;
	streams->oldest = (streams->oldest + 1) % STREAMS;
	return false;
}

/* What a miss costs, by whether a stream predicted it. */
struct cost {
	uint32_t latency_ns; /* as hardware would have it */
	uint64_t delay;      /* what the guest is made to wait, stretched, in ticks of the clock */
};

struct tier {
	struct cost random;
	struct cost predicted;
};

/* Memory of one tier that lies in one piece. */
struct range {
	uint64_t start; /* [start, end) as the emulator reports physical addresses */
	uint64_t end;
	uint64_t offset; /* of `start`: in the machine's RAM, or gPA where that is all there is to it */
	bool is_ram;     /* else it is plugged in */
	const struct tier *tier;
};

#define RANGES_MAX 4u

/*
 * The PC's RAM is one run of bytes, node 0's before node 1's, of which the guest sees the part
 * beyond `below_4g` from 4 GiB on. Beyond all RAM lies what is plugged in.
 */
struct machine {
	struct tier fast;
	struct tier slow;
	struct range ranges[RANGES_MAX];
	unsigned int range_count;
	uint64_t below_4g;
};

/* The emulator's 256 KiB grain when it lays out RAM blocks. */
#define RAM_BLOCK_ALIGN (1ull << 18)
/* Memory devices begin so far, rounded up, beyond the first address that is theirs. */
#define PLUG_ALIGN (128ull << MIB_SHIFT)
/* With less RAM than this all of it lies below 4 GiB, else what is beyond 3 GiB lies above. */
#define RAM_LOW_MAX 0xe0000000ull

static inline uint64_t round_up(uint64_t bytes, uint64_t to)
{
	return (bytes + to - 1) / to * to;
}

/*
 * Lays out both tiers as QEMU 7.2's qemu_plugin_hwaddr_phys_addr reports them. Its answer is not
 * the gPA but block offset + offset in the block + the block's place in its container, which is
 * the machine's RAM or the memory devices' region. The blocks' offsets follow the order in which
 * they are made: node 0's backend first (0), then node 1's, then those of both memory devices.
 * Node 1's place in RAM is the size of node 0. The devices lie `gap` bytes into their region:
 * without the gap the first one would be reported where node 1 is.
 */
static inline void machine_layout(struct machine *machine, uint64_t fast_bytes, uint64_t slow_bytes,
				  uint64_t plug_bytes)
{
	uint64_t slow_block = round_up(fast_bytes, RAM_BLOCK_ALIGN);
	uint64_t plug_block = slow_block + round_up(slow_bytes, RAM_BLOCK_ALIGN);
	uint64_t gap = round_up(fast_bytes, PLUG_ALIGN);
	uint64_t ram_bytes = fast_bytes + slow_bytes;

	/* -machine pc: 3.5 GiB and more are split at 3 GiB. */
	machine->below_4g = ram_bytes >= RAM_LOW_MAX ? 0xc0000000ull : UINT64_MAX;
	machine->range_count = plug_bytes ? 4 : 2;
	machine->ranges[0] = (struct range){
		.end = fast_bytes, .is_ram = true, .tier = &machine->fast,
	};
	machine->ranges[1] = (struct range){
		.start = slow_block + fast_bytes, .end = slow_block + fast_bytes + slow_bytes,
		.offset = fast_bytes, .is_ram = true, .tier = &machine->slow,
	};
	/* The memory devices' region: from the first whole GiB behind RAM and 4 GiB on. */
	uint64_t above_4g = ram_bytes >= RAM_LOW_MAX ? ram_bytes - machine->below_4g : 0;
	uint64_t plug_gpa = (4ull << 30) + round_up(above_4g, 1ull << 30) + gap;
	for (unsigned int i = 0; i < 2; i++) {
		uint64_t start = plug_block + gap + 2 * i * plug_bytes;

		machine->ranges[2 + i] = (struct range){
			.start = start, .end = start + plug_bytes,
			.offset = plug_gpa + i * plug_bytes,
			.tier = i ? &machine->slow : &machine->fast,
		};
	}
}

/* The range of an address as the emulator reports it; NULL for ROM, video memory and the like. */
static inline const struct range *machine_range(const struct machine *machine, uint64_t reported)
{
	for (unsigned int i = 0; i < machine->range_count; i++) {
		const struct range *range = &machine->ranges[i];

		if (reported - range->start < range->end - range->start)
			return range;
	}
	return NULL;
}

/* The true gPA of an address that the emulator reports in `range`. */
static inline uint64_t machine_gpa(const struct machine *machine, const struct range *range,
				   uint64_t reported)
{
	uint64_t offset = reported - range->start + range->offset;

	if (!range->is_ram || offset < machine->below_4g)
		return offset;
	return offset - machine->below_4g + (1ull << 32);
}

#endif
