/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The modelled TLBs of one vCPU, for data: two levels, pages of 4 KiB, 2 MiB and 1 GiB, exact LRU in each set.
 * Pure: no emulator. The simulator's model (crates/sim/src/machine/tlb.rs) has the same hits; its test compares them.
 */
#ifndef DEMETER_TLB_MODEL_H
#define DEMETER_TLB_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#define TLB_SETS_MAX 512u
#define TLB_WAYS_MAX 16u

/* A power of two of sets, and entries in each; at most the figures above. */
struct tlb_geometry {
	uint32_t sets, ways;
};

/* Page sizes; the first level has an array for each. */
#define TLB_SIZES 3u
static const unsigned int tlb_size_shift[TLB_SIZES] = { 12, 21, 30 };

/* Arrays: of the first level by page size, then the second level's for small and huge pages, and for giant ones. */
enum { TLB_SECOND = TLB_SIZES, TLB_SECOND_GIANT, TLB_ARRAYS };

struct tlb_sizes {
	struct tlb_geometry of[TLB_ARRAYS];
	bool is_second_small; /* the second level holds 4 KiB pages only */
};

/* An entry is a key: page number << 4 | global << 3 | size << 1 | 1. 0 = empty. Each set has its most recent first. */
#define TLB_GLOBAL 8u

struct tlb_array {
	uint64_t keys[TLB_SETS_MAX][TLB_WAYS_MAX];
};

struct tlb {
	struct tlb_array arrays[TLB_ARRAYS];
};

static inline bool tlb_geometry_is_sound(struct tlb_geometry geometry)
{
	return geometry.sets && geometry.sets <= TLB_SETS_MAX && !(geometry.sets & (geometry.sets - 1)) &&
	       geometry.ways && geometry.ways <= TLB_WAYS_MAX;
}

/* The key of an address in a page of this size. Bit 3 is set, whether the page is global or not. */
static inline uint64_t tlb_key(uint64_t gva, unsigned int size)
{
	return gva >> tlb_size_shift[size] << 4 | TLB_GLOBAL | size << 1 | 1;
}

static inline uint64_t *tlb_set(struct tlb *tlb, const struct tlb_sizes *sizes, unsigned int array, uint64_t key)
{
	return tlb->arrays[array].keys[key >> 4 & (sizes->of[array].sets - 1)];
}

/* Looks a key up and makes it the most recent. Returns the entry, or 0. */
static inline uint64_t tlb_find(struct tlb *tlb, const struct tlb_sizes *sizes, unsigned int array, uint64_t key)
{
	uint64_t *set = tlb_set(tlb, sizes, array, key);

	for (uint32_t way = 0; way < sizes->of[array].ways && set[way]; way++) {
		uint64_t entry = set[way];

		if ((entry | TLB_GLOBAL) == key) {
			for (; way; way--)
				set[way] = set[way - 1];
			set[0] = entry;
			return entry;
		}
	}
	return 0;
}

/* Inserts an absent entry as the most recent, in place of the least recent. */
static inline void tlb_put(struct tlb *tlb, const struct tlb_sizes *sizes, unsigned int array, uint64_t entry)
{
	uint64_t *set = tlb_set(tlb, sizes, array, entry);

	for (uint32_t way = sizes->of[array].ways - 1; way; way--)
		set[way] = set[way - 1];
	set[0] = entry;
}

static inline unsigned int tlb_second(unsigned int size)
{
	return size == TLB_SIZES - 1 ? TLB_SECOND_GIANT : TLB_SECOND;
}

/*
 * Whether the page is the most recent of its set, small or huge: most accesses are. Then a hit changes nothing. A miss
 * here says nothing.
 */
static inline bool tlb_hit_fast(struct tlb *tlb, const struct tlb_sizes *sizes, uint64_t gva)
{
	for (unsigned int size = 0; size < 2; size++) {
		uint64_t key = tlb_key(gva, size);

		if ((*tlb_set(tlb, sizes, size, key) | TLB_GLOBAL) == key)
			return true;
	}
	return false;
}

/* Whether the access hits. A hit of the second level enters the first. */
static inline bool tlb_hit(struct tlb *tlb, const struct tlb_sizes *sizes, uint64_t gva)
{
	if (tlb_hit_fast(tlb, sizes, gva))
		return true;
	for (unsigned int size = 0; size < TLB_SIZES; size++)
		if (tlb_find(tlb, sizes, size, tlb_key(gva, size)))
			return true;
	for (unsigned int size = 0; size < TLB_SIZES; size++) {
		uint64_t entry = tlb_find(tlb, sizes, tlb_second(size), tlb_key(gva, size));

		if (entry) {
			tlb_put(tlb, sizes, size, entry);
			return true;
		}
	}
	return false;
}

/* Enters a page of `1 << shift` bytes that was missed. Of another size it stays absent. */
static inline void tlb_enter(struct tlb *tlb, const struct tlb_sizes *sizes, uint64_t gva, unsigned int shift,
			     bool is_global)
{
	for (unsigned int size = 0; size < TLB_SIZES; size++) {
		if (tlb_size_shift[size] != shift)
			continue;
		uint64_t key = tlb_key(gva, size), entry = is_global ? key : key & ~(uint64_t)TLB_GLOBAL;

		tlb_put(tlb, sizes, size, entry);
		if (!size || !sizes->is_second_small)
			tlb_put(tlb, sizes, tlb_second(size), entry);
	}
}

/* Whether any level has it, without being an access. */
static inline bool tlb_holds(struct tlb *tlb, const struct tlb_sizes *sizes, uint64_t gva)
{
	for (unsigned int array = 0; array < TLB_ARRAYS; array++) {
		for (unsigned int size = 0; size < TLB_SIZES; size++) {
			if (array != size && array != tlb_second(size))
				continue;
			uint64_t key = tlb_key(gva, size);
			const uint64_t *set = tlb_set(tlb, sizes, array, key);

			for (uint32_t way = 0; way < sizes->of[array].ways && set[way]; way++)
				if ((set[way] | TLB_GLOBAL) == key)
					return true;
		}
	}
	return false;
}

/* Drops the entries of a set that `key` names, or all of 0; of those the global ones stay unless `with_global`. */
static inline void tlb_drop(uint64_t *set, uint32_t ways, uint64_t key, bool with_global)
{
	uint32_t kept = 0;

	for (uint32_t way = 0; way < ways && set[way]; way++) {
		uint64_t entry = set[way];

		if (key ? (entry | TLB_GLOBAL) != key : !with_global && (entry & TLB_GLOBAL))
			set[kept++] = entry;
		if (kept <= way)
			set[way] = 0;
	}
}

/* Drops the translations of one address. */
static inline void tlb_forget(struct tlb *tlb, const struct tlb_sizes *sizes, uint64_t gva)
{
	for (unsigned int size = 0; size < TLB_SIZES; size++) {
		const unsigned int arrays[] = { size, tlb_second(size) };

		for (unsigned int i = 0; i < 2; i++) {
			uint64_t key = tlb_key(gva, size);

			tlb_drop(tlb_set(tlb, sizes, arrays[i], key), sizes->of[arrays[i]].ways, key, true);
		}
	}
}

/* Drops all translations, or all but those of global pages. */
static inline void tlb_forget_all(struct tlb *tlb, const struct tlb_sizes *sizes, bool with_global)
{
	for (unsigned int array = 0; array < TLB_ARRAYS; array++)
		for (uint32_t set = 0; set < sizes->of[array].sets; set++)
			tlb_drop(tlb->arrays[array].keys[set], sizes->of[array].ways, 0, with_global);
}

#endif
