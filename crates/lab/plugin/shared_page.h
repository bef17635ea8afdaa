/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The memory that the emulator's plugin shares with its guest: a control page,
 * then one ring of samples per vCPU, then counts of loads. In the guest it is BAR 2 of an
 * ivshmem-plain device (vendor 0x1af4, device 0x1110).
 *
 * All fields are little-endian. The guest's reader keeps the same figures in
 * crates/guest/src/tracker/lab.rs; a test holds the two against each other.
 */
#ifndef DEMETER_SHARED_PAGE_H
#define DEMETER_SHARED_PAGE_H

#include <stdint.h>

#define DEMETER_MAGIC 0x31525444u /* "DTR1" */
#define DEMETER_VERSION 1u
#define DEMETER_CONTROL_BYTES 4096u
#define DEMETER_RING_HEADER_BYTES 64u
#define DEMETER_RECORD_BYTES 32u
#define DEMETER_RING_RECORDS 4096u /* per vCPU; a power of two */
#define DEMETER_MAX_VCPUS 16u
#define DEMETER_MAX_NODES 64u
#define DEMETER_RING_BYTES (DEMETER_RING_HEADER_BYTES + DEMETER_RING_RECORDS * DEMETER_RECORD_BYTES)
#define DEMETER_LOADS_OFFSET (DEMETER_CONTROL_BYTES + DEMETER_MAX_VCPUS * DEMETER_RING_BYTES)
#define DEMETER_LOADS_BLOCK_SHIFT 21 /* blocks of 2 MiB */
#define DEMETER_LOADS_BLOCKS 65536u
#define DEMETER_SHARED_BYTES 4194304u /* all of it: a power of two, as a PCI BAR must be */

/* Offset 0. Written by the plugin unless it says otherwise. */
struct demeter_control {
	uint32_t magic;
	uint32_t version;
	uint32_t vcpus;          /* how many rings follow */
	uint32_t ring_records;   /* records in each */
	uint32_t armed;          /* guest: 1 = slow memory is slow */
	uint32_t period;         /* guest: one sample every so many loads that count; 0 = off */
	uint32_t threshold_ns;   /* guest: only loads of at least this modelled latency count;
				    nanoseconds of the modelled hardware, not stretched */
	/*
	 * Before the guest arms the plugin, it shows pages, from which the plugin learns how this
	 * emulator reports physical addresses. The guest fills in a page with a known address, sets
	 * `asked` to another number than `answered`, and loads from the page. It then finds that
	 * number in `answered`.
	 */
	uint32_t asked;          /* guest; 0 = nothing */
	uint64_t page_gva;       /* guest */
	uint64_t page_gpa;       /* guest: by /proc/self/pagemap */
	uint32_t page_node;      /* guest */
	uint32_t answered;       /* the last page that was seen */
	uint32_t fitting;        /* a bit for each way of reporting that fits all pages so far; 0: no
				    tier can be told */
	uint32_t reserved;
	uint64_t page_reported;  /* what the emulator reported for that page */
	/* Where each node begins by the sizes that the plugin was given; all bits set: no memory. */
	uint64_t node_gpa[DEMETER_MAX_NODES];
};

/* Ring i: offset CONTROL_BYTES + i * RING_BYTES: this header, then the records. */
struct demeter_ring {
	uint64_t head;           /* plugin: records ever written */
	uint64_t tail;           /* guest: records ever taken */
	uint64_t dropped;        /* plugin: samples lost because the ring was full */
	uint64_t misses;         /* plugin: cache misses while armed or sampling */
	uint64_t strays;         /* plugin: those of them that fell in no tier */
	uint64_t lag_ns;         /* plugin: time in which the host ran something else while armed */
	uint64_t reserved[2];
};

/*
 * Offset LOADS_OFFSET: for each block of user addresses, loads of user code that missed the caches
 * and that no prefetcher predicted. A test compares the unit's samples with these counts. Only an
 * emulator whose CPUs have a sampling unit counts. Blocks that are LOADS_BLOCKS blocks apart share
 * a count.
 */
struct demeter_loads {
	uint64_t of_block[DEMETER_LOADS_BLOCKS];
};

struct demeter_record {
	uint64_t gva;            /* guest-virtual address of the load */
	uint64_t gpa;            /* guest-physical address */
	uint64_t ip;             /* instruction pointer */
	uint32_t latency_ns;     /* modelled latency of the load, not stretched */
	uint32_t vcpu;
};

_Static_assert(sizeof(struct demeter_control) <= DEMETER_CONTROL_BYTES, "control page");
_Static_assert(sizeof(struct demeter_ring) == DEMETER_RING_HEADER_BYTES, "ring header");
_Static_assert(sizeof(struct demeter_record) == DEMETER_RECORD_BYTES, "record");
_Static_assert(DEMETER_LOADS_OFFSET % sizeof(uint64_t) == 0, "alignment");
_Static_assert(DEMETER_LOADS_OFFSET + sizeof(struct demeter_loads) <= DEMETER_SHARED_BYTES,
	       "all fits");

#endif
