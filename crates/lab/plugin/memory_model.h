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
	uint64_t delay;      /* how long the guest's access takes, stretched, in ticks of the clock */
};

struct tier {
	uint64_t start; /* [start, end) as the emulator reports physical addresses */
	uint64_t end;
	uint64_t ram_offset; /* of `start` in the machine's RAM */
	struct cost random;
	struct cost predicted;
};

/*
 * The PC's RAM is one run of bytes, node 0's before node 1's, of which the guest sees the part
 * beyond `below_4g` from 4 GiB on.
 */
struct machine {
	struct tier fast;
	struct tier slow;
	uint64_t below_4g;
};

/* The emulator's 256 KiB grain when it lays out RAM blocks. */
#define RAM_BLOCK_ALIGN (1ull << 18)

/*
 * Lays out both tiers as QEMU 7.2's qemu_plugin_hwaddr_phys_addr reports them. Its answer is not
 * the gPA but block offset + offset in the block + the block's place in the machine's RAM. The
 * blocks' offsets follow the order in which they are made: node 0's backend first (0), then node
 * 1's (after it); and node 1's place in RAM is the size of node 0.
 */
static inline void machine_layout(struct machine *machine, uint64_t fast_bytes, uint64_t slow_bytes)
{
	uint64_t slow_block = (fast_bytes + RAM_BLOCK_ALIGN - 1) / RAM_BLOCK_ALIGN * RAM_BLOCK_ALIGN;

	machine->fast.start = 0;
	machine->fast.end = fast_bytes;
	machine->fast.ram_offset = 0;
	machine->slow.start = slow_block + fast_bytes;
	machine->slow.end = machine->slow.start + slow_bytes;
	machine->slow.ram_offset = fast_bytes;
	/* -machine pc: 3.5 GiB and more are split at 3 GiB. */
	machine->below_4g = fast_bytes + slow_bytes >= 0xe0000000ull ? 0xc0000000ull : UINT64_MAX;
}

/* The tier of an address as the emulator reports it; NULL for ROM, video memory and the like. */
static inline const struct tier *machine_tier(const struct machine *machine, uint64_t reported)
{
	if (reported - machine->fast.start < machine->fast.end - machine->fast.start)
		return &machine->fast;
	if (reported - machine->slow.start < machine->slow.end - machine->slow.start)
		return &machine->slow;
	return NULL;
}

/* The true gPA of an address that the emulator reports in `tier`. */
static inline uint64_t machine_gpa(const struct machine *machine, const struct tier *tier,
				   uint64_t reported)
{
	uint64_t offset = reported - tier->start + tier->ram_offset;

	return offset < machine->below_4g ? offset : offset - machine->below_4g + (1ull << 32);
}

#endif
