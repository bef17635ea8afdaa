/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The modelled memory: which accesses leave the caches, in which node they land, what they cost.
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
 * It is looked up by gVA, which the emulator provides at no cost. The gPA needs a walk through the
 * emulator's structures, and hits must be cheap. The price is accuracy: a line of another process
 * at an equal gVA counts as a hit until it is replaced, and a line that is mapped at two addresses
 * is cached twice.
 */
#define FILTER_LINES (1u << (MIB_SHIFT - LINE_SHIFT))

struct filter {
	uint32_t tag[FILTER_LINES]; /* 0 = empty: programs have no data in the first MiB of a gVA space */
};

/* Whether the line was cached; caches it. */
static inline bool filter_hit(struct filter *filter, uint64_t gva)
{
	/* Bits 20 to 51 distinguish user from kernel addresses, and any two addresses of 48 bits. */
	uint32_t tag = (uint32_t)(gva >> MIB_SHIFT);
	/*
	 * The tag is folded in. Without it, the two sides of a huge page's copy, which differ by a
	 * multiple of 2 MiB, would evict each other.
	 */
	uint32_t *slot = &filter->tag[((gva >> LINE_SHIFT) ^ tag) % FILTER_LINES];

	if (*slot == tag)
		return true;
	*slot = tag;
	return false;
}

/*
 * The streams that the modelled prefetchers of one vCPU follow. The data of a stream's next line is
 * in flight already, so a miss on it costs bandwidth, not latency. So does a second miss on the
 * stream's last line, which the small filter may cause but a real cache would not. Any other miss
 * costs the latency, and starts a stream in place of the oldest.
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

/* The cost of a miss. */
struct cost {
	uint32_t latency_ns; /* as hardware would have it */
	uint64_t delay;      /* how long the guest's access takes, stretched, in ticks of the clock */
};

/* The way from a socket's CPUs to a node. */
struct path {
	struct cost random;
	struct cost predicted;
};

#define NODES_MAX 64u
#define SOCKETS_MAX 16u

/* Memory of one node that lies in one piece, both for the guest and as the emulator reports it. */
struct range {
	uint64_t start; /* [start, end) as the emulator reports physical addresses */
	uint64_t end;
	uint64_t gpa; /* of `start` */
	unsigned int node;
};

/* All nodes, one of which may lie on both sides of the gap below 4 GiB, and what is plugged in. */
#define RANGES_MAX (2 * NODES_MAX + 1)

/* Where all memory is. */
struct layout {
	struct range ranges[RANGES_MAX];
	unsigned int range_count;
};

/*
 * Formats in which an emulator reports the address of an access:
 *
 * AS_GPA    the gPA: QEMU 8.1 and later.
 * AS_BLOCK  block offset + offset in the block + the block's place in its container, which is the
 *           machine's RAM or the memory devices' region: QEMU 7.2 and 8.0. The blocks' offsets
 *           follow the order in which they are made: node 0's backend first (0), then the other
 *           nodes', then those of the memory devices in the nodes' order.
 */
enum reporting { AS_GPA, AS_BLOCK };
#define REPORTINGS 2u

/* The machine's memory. */
struct sizes {
	unsigned int node_count;
	struct {
		uint64_t ram;  /* bytes; 0 for none */
		uint64_t plug; /* the same of its memory device */
	} node[NODES_MAX];
};

/* The emulator's 256 KiB grain when it lays out RAM blocks. */
#define RAM_BLOCK_ALIGN (1ull << 18)
/* Memory devices begin so far, rounded up, beyond the first address that is theirs. */
#define PLUG_ALIGN (128ull << MIB_SHIFT)
#define GIB (1024ull << MIB_SHIFT)
/* From this size on, RAM beyond RAM_LOW lies at 4 GiB and above (-machine pc). */
#define RAM_SPLIT_MIN (3584ull << MIB_SHIFT)
#define RAM_LOW (3 * GIB)

static inline uint64_t round_up(uint64_t bytes, uint64_t to)
{
	return (bytes + to - 1) / to * to;
}

static inline void add_range(struct layout *layout, uint64_t start, uint64_t gpa, uint64_t bytes,
			     unsigned int node)
{
	if (bytes)
		layout->ranges[layout->range_count++] =
			(struct range){ .start = start, .end = start + bytes, .gpa = gpa, .node = node };
}

/*
 * Lays out a PC's memory. Its RAM is one run of bytes, in the nodes' order. The memory devices lie
 * `gap` bytes into their region, which begins at the first whole GiB behind RAM and 4 GiB. The gap
 * is as long as RAM before the last node: without it the first device would be reported where that
 * node is.
 */
static inline struct layout layout_of(const struct sizes *sizes, enum reporting reporting)
{
	struct layout layout = { 0 };
	uint64_t ram_bytes = 0, before_last = 0;

	for (unsigned int node = 0; node < sizes->node_count; node++) {
		if (sizes->node[node].ram)
			before_last = ram_bytes;
		ram_bytes += sizes->node[node].ram;
	}
	uint64_t low_bytes = ram_bytes >= RAM_SPLIT_MIN ? RAM_LOW : ram_bytes;
	uint64_t gap = round_up(before_last, PLUG_ALIGN);
	uint64_t plug_gpa = 4 * GIB + round_up(ram_bytes - low_bytes, GIB) + gap;
	uint64_t block = 0; /* offset of the next block */
	uint64_t first = 0; /* in RAM: the block's place */

	for (unsigned int node = 0; node < sizes->node_count; node++) {
		uint64_t end = first + sizes->node[node].ram;
		uint64_t split = end < low_bytes ? end : first > low_bytes ? first : low_bytes;
		uint64_t high = split - low_bytes + 4 * GIB; /* gPA of what is behind the split */
		bool as_gpa = reporting == AS_GPA;

		add_range(&layout, as_gpa ? first : block + first, first, split - first, node);
		add_range(&layout, as_gpa ? high : block + split, high, end - split, node);
		block += round_up(end - first, RAM_BLOCK_ALIGN);
		first = end;
	}
	for (unsigned int node = 0; node < sizes->node_count; node++) {
		uint64_t bytes = sizes->node[node].plug;

		add_range(&layout, reporting == AS_GPA ? plug_gpa : block + gap, plug_gpa, bytes, node);
		block += bytes;
		plug_gpa += bytes;
		gap += bytes;
	}
	return layout;
}

/* The range of an address as the emulator reports it; NULL for ROM, video memory and the like. */
static inline const struct range *range_at(const struct layout *layout, uint64_t reported)
{
	for (unsigned int i = 0; i < layout->range_count; i++) {
		const struct range *range = &layout->ranges[i];

		if (reported - range->start < range->end - range->start)
			return range;
	}
	return NULL;
}

/* The gPA of an address that the emulator reports in `range`. */
static inline uint64_t gpa_in(const struct range *range, uint64_t reported)
{
	return reported - range->start + range->gpa;
}

/* The gPA at which a node begins. */
static inline uint64_t node_gpa(const struct layout *layout, unsigned int node)
{
	unsigned int i = 0;

	while (i < layout->range_count && layout->ranges[i].node != node)
		i++;
	return i < layout->range_count ? layout->ranges[i].gpa : UINT64_MAX;
}

/* Whether this is how an access to `gpa`, which is in `node`, is reported. */
static inline bool layout_fits(const struct layout *layout, uint64_t gpa, unsigned int node,
			       uint64_t reported)
{
	const struct range *range = range_at(layout, reported);

	return range && range->node == node && gpa_in(range, reported) == gpa;
}

#endif
