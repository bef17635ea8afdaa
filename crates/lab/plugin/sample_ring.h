/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The writing end of one vCPU's ring of samples (shared_page.h).
 *
 * The reader shares the memory and may write anything into it at any time. The writer therefore
 * keeps its position in private memory. Of the shared words it reads only `tail`, and treats an
 * invalid value as a full ring.
 */
#ifndef DEMETER_SAMPLE_RING_H
#define DEMETER_SAMPLE_RING_H

#include <stdbool.h>
#include <stdint.h>

#include "shared_page.h"

struct ring_writer {
	struct demeter_ring *shared;
	struct demeter_record *records; /* DEMETER_RING_RECORDS of them */
	uint64_t head;
	uint64_t dropped;
	uint64_t misses;
	uint64_t strays;
	uint64_t lag_ns;
};

/* The ring of `vcpu` in the shared memory that begins at `base`. */
static inline struct ring_writer ring_writer_at(void *base, unsigned int vcpu)
{
	char *ring = (char *)base + DEMETER_CONTROL_BYTES + (size_t)vcpu * DEMETER_RING_BYTES;

	return (struct ring_writer){
		.shared = (struct demeter_ring *)ring,
		.records = (struct demeter_record *)(ring + DEMETER_RING_HEADER_BYTES),
	};
}

/* Counts a cache miss; a stray is outside all tiers. */
static inline void ring_count_miss(struct ring_writer *ring, bool is_stray)
{
	ring->misses++;
	__atomic_store_n(&ring->shared->misses, ring->misses, __ATOMIC_RELAXED);
	if (!is_stray)
		return;
	ring->strays++;
	__atomic_store_n(&ring->shared->strays, ring->strays, __ATOMIC_RELAXED);
}

/* Counts time in which the host did not run the vCPU. */
static inline void ring_count_lag(struct ring_writer *ring, uint64_t ns)
{
	ring->lag_ns += ns;
	__atomic_store_n(&ring->shared->lag_ns, ring->lag_ns, __ATOMIC_RELAXED);
}

/* Appends a record, or counts it as dropped if the ring is full. */
static inline void ring_push(struct ring_writer *ring, const struct demeter_record *record)
{
	uint64_t tail = __atomic_load_n(&ring->shared->tail, __ATOMIC_ACQUIRE);

	/* A tail ahead of the head, or too far behind it, wraps to a number above the size. */
	if (ring->head - tail >= DEMETER_RING_RECORDS) {
		ring->dropped++;
		__atomic_store_n(&ring->shared->dropped, ring->dropped, __ATOMIC_RELAXED);
		return;
	}
	ring->records[ring->head % DEMETER_RING_RECORDS] = *record;
	ring->head++;
	/* Publish the head after the record. */
	__atomic_store_n(&ring->shared->head, ring->head, __ATOMIC_RELEASE);
}

#endif
