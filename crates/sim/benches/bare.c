// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A plain C version of the model's access loop: equal TLBs, page-walk caches, page tables, caches and tiers. Each set
// is a list with the most recent entry first. Results must match to the picosecond. It supports pages of 4 KiB and one
// VM only, without faults, segments and flushes.
//
// Usage: bare BYTES. Standard input has the number of accesses, the accesses (address, bit 63 for a store), and one
// byte for each pass over all accesses: bit 0 nested, bit 1 caches. Each pass prints two numbers: CPU time in
// nanoseconds and simulated picoseconds. All numbers have 64 bits, in native byte order.

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BASE (1ull << 30)
#define STORE (1ull << 63)
#define PRESENT (1u << 31)
#define ACCESSED (1u << 30)
#define DIRTY (1u << 29)
#define INDEX ((1u << 26) - 1)
#define UPPER 8192
#define EMPTY UINT32_MAX

// A set-associative array of WAYS ways with VALUE in each entry; exact LRU.
#define ARRAY(NAME, WAYS, VALUE)                                                                                   \
	struct __attribute__((aligned(64))) NAME##_set {                                                           \
		uint32_t tags[WAYS];                                                                               \
		VALUE values[WAYS];                                                                                \
	};                                                                                                         \
	struct NAME {                                                                                              \
		struct NAME##_set *sets;                                                                           \
		uint32_t mask, bits;                                                                               \
	};                                                                                                         \
	static struct NAME NAME##_new(uint32_t bits)                                                               \
	{                                                                                                          \
		struct NAME a = { aligned_alloc(64, sizeof(struct NAME##_set) << bits), (1u << bits) - 1, bits }; \
		memset(a.sets, 0xff, sizeof(struct NAME##_set) << bits);                                           \
		return a;                                                                                          \
	}                                                                                                          \
	static inline VALUE *NAME##_get(struct NAME *a, uint64_t key)                                              \
	{                                                                                                          \
		struct NAME##_set *s = &a->sets[key & a->mask];                                                    \
		uint32_t tag = key >> a->bits;                                                                     \
		for (int i = 0; i < WAYS; i++)                                                                     \
			if (s->tags[i] == tag) {                                                                   \
				VALUE value = s->values[i];                                                        \
				for (int j = i; j > 0; j--) {                                                      \
					s->tags[j] = s->tags[j - 1];                                               \
					s->values[j] = s->values[j - 1];                                           \
				}                                                                                  \
				s->tags[0] = tag;                                                                  \
				s->values[0] = value;                                                              \
				return &s->values[0];                                                              \
			}                                                                                          \
		return NULL;                                                                                       \
	}                                                                                                          \
	static inline void NAME##_insert(struct NAME *a, uint64_t key, VALUE value)                                \
	{                                                                                                          \
		struct NAME##_set *s = &a->sets[key & a->mask];                                                    \
		memmove(s->tags + 1, s->tags, sizeof s->tags - sizeof *s->tags);                                   \
		memmove(s->values + 1, s->values, sizeof s->values - sizeof *s->values);                           \
		s->tags[0] = key >> a->bits;                                                                       \
		s->values[0] = value;                                                                              \
	}

// Data caches have no values.
#define CACHE(NAME, WAYS)                                                                                          \
	struct NAME {                                                                                              \
		uint32_t (*sets)[WAYS];                                                                            \
		uint32_t mask, bits;                                                                               \
	};                                                                                                         \
	static struct NAME NAME##_new(uint32_t bits)                                                               \
	{                                                                                                          \
		struct NAME a = { aligned_alloc(64, sizeof(uint32_t[WAYS]) << bits), (1u << bits) - 1, bits };     \
		memset(a.sets, 0xff, sizeof(uint32_t[WAYS]) << bits);                                              \
		return a;                                                                                          \
	}                                                                                                          \
	static inline bool NAME##_touch(struct NAME *a, uint64_t key)                                              \
	{                                                                                                          \
		uint32_t *tags = a->sets[key & a->mask], tag = key >> a->bits;                                     \
		int i = 0;                                                                                         \
		while (i < WAYS - 1 && tags[i] != tag)                                                             \
			i++;                                                                                       \
		bool hit = tags[i] == tag;                                                                         \
		for (; i > 0; i--)                                                                                 \
			tags[i] = tags[i - 1];                                                                     \
		tags[0] = tag;                                                                                     \
		return hit;                                                                                        \
	}

struct place {
	uint32_t node, page;
};
ARRAY(tlb1, 4, uint32_t)
ARRAY(tlb2, 16, uint32_t)
ARRAY(pwc, 4, struct place)
CACHE(l1, 12)
CACHE(l2, 16)
CACHE(l3, 12)

// Page tables of four levels: tables above the last level, then those of the last.
struct tree {
	uint32_t *upper, *leaf, uppers, leaves;
	struct pwc walk1, walk2, walk3;
};

static uint32_t *entry(struct tree *t, int level, uint32_t node, uint64_t addr)
{
	return (level == 1 ? t->leaf : t->upper) + node * 512ull + (addr >> (9 * level + 3) & 511);
}

static struct tree tree_new(uint64_t bytes)
{
	struct tree t = { .uppers = 1 };
	t.upper = calloc(UPPER * 512, 4);
	t.leaf = calloc((bytes >> 21) + 2, 2048);
	t.walk1 = pwc_new(3);
	t.walk2 = pwc_new(0);
	t.walk3 = pwc_new(0);
	return t;
}

static void map(struct tree *t, uint64_t addr, uint32_t frame)
{
	uint32_t node = 0;
	for (int level = 4; level > 1; level--) {
		uint32_t *e = entry(t, level, node, addr);
		if (!(*e & PRESENT))
			*e = PRESENT | (level > 2 ? t->uppers++ : t->leaves++);
		node = *e & INDEX;
	}
	*entry(t, 1, node, addr) = PRESENT | frame;
}

static struct tier {
	uint64_t latency_ps, stream_ps, read, written;
} tiers[2] = { { 80000, 5333, 0, 0 }, { 250000, 5333, 0, 0 } };

static struct tree guest, host;
static struct tlb1 first;
static struct tlb2 second;
static struct l1 data1;
static struct l2 data2;
static struct l3 data3;
static uint64_t slow_line, streams[8], oldest, last_line = -1, last_page = -1;
static uint32_t last_frame;
static bool last_dirty;
static struct tier *clean_from;
static uint64_t period = 4093, left = 1, records, sampled[1000];

static inline bool is_predicted(uint64_t line)
{
	for (int i = 0; i < 8; i++)
		if (streams[i] == line - 1) {
			streams[i] = line;
			return true;
		}
	oldest = (oldest + 1) % 8;
	streams[oldest] = line;
	return false;
}

static inline uint64_t fetch(bool caches, uint64_t line, bool stream)
{
	if (caches) {
		if (l1_touch(&data1, line))
			return 345;
		if (l2_touch(&data2, line))
			return 4800;
		if (l3_touch(&data3, line))
			return 24000;
	}
	struct tier *tier = &tiers[line >= slow_line];
	tier->read++;
	uint64_t ps = stream && is_predicted(line) ? tier->stream_ps : tier->latency_ps;
	if (stream)
		clean_from = tier;
	return ps;
}

// Returns the host position of the next table, or the frame of a page with DIRTY; charges each reference.
static inline uint32_t walk(struct tree *t, bool nested, bool caches, uint64_t addr, bool store, uint64_t *ps);

static inline uint32_t open(bool nested, bool caches, uint32_t page, uint64_t *ps)
{
	return nested ? walk(&host, false, caches, (uint64_t)page << 12, true, ps) & INDEX : page;
}

static inline __attribute__((always_inline)) uint32_t walk(struct tree *t, bool nested, bool caches, uint64_t addr,
							    bool store, uint64_t *ps)
{
	int level = 1;
	uint32_t node = 0, page;
	struct place *known;
	if ((known = pwc_get(&t->walk1, addr >> 21)) != NULL) {
		level = 1;
	} else if ((known = pwc_get(&t->walk2, addr >> 30)) != NULL) {
		level = 2;
	} else if ((known = pwc_get(&t->walk3, addr >> 39)) != NULL) {
		level = 3;
	} else {
		level = 4;
	}
	if (known) {
		node = known->node;
		page = known->page;
	} else {
		page = open(nested, caches, 0, ps);
	}
	for (;;) {
		*ps += fetch(caches, ((uint64_t)page << 12 | (addr >> (9 * level + 3) & 511) * 8) >> 6, false);
		uint32_t *e = entry(t, level, node, addr);
		uint32_t bits = ACCESSED | (store && level == 1 ? DIRTY : 0);
		if (!(*e & PRESENT))
			abort();
		if ((*e & bits) != bits)
			*e |= bits;
		if (level == 1)
			return *e & (INDEX | DIRTY);
		level--;
		node = *e & INDEX;
		page = open(nested, caches, level == 1 ? UPPER + node : node, ps);
		struct place place = { node, page };
		pwc_insert(level == 1 ? &t->walk1 : level == 2 ? &t->walk2 : &t->walk3, addr >> (9 * level + 12), place);
	}
}

static inline uint64_t translate(bool nested, bool caches, uint64_t addr, bool store)
{
	uint64_t page = addr >> 12;
	uint32_t *t = tlb1_get(&first, page), found;
	uint64_t ps = 0;
	if (!t && (t = tlb2_get(&second, page)) != NULL) {
		ps = 2400;
		tlb1_insert(&first, page, *t);
	}
	if (t && (!store || *t & DIRTY)) {
		found = *t;
	} else {
		ps = 2400;
		found = walk(&guest, nested, caches, addr, store, &ps);
		if (nested) {
			uint64_t gpa = (uint64_t)(found & INDEX) << 12 | (addr & 4095);
			uint32_t in_host = walk(&host, false, caches, gpa, store, &ps);
			found = (in_host & INDEX) | (found & in_host & DIRTY);
		}
		uint32_t *there = tlb1_get(&first, page);
		if (there)
			*there = found;
		else
			tlb1_insert(&first, page, found);
		there = tlb2_get(&second, page);
		if (there)
			*there = found;
		else
			tlb2_insert(&second, page, found);
	}
	last_page = page;
	last_frame = found & INDEX;
	last_dirty = found & DIRTY;
	return ps;
}

static inline __attribute__((always_inline)) uint64_t pass(bool nested, bool caches, const uint64_t *accesses, size_t n)
{
	uint64_t total = 0;
	for (size_t i = 0; i < n; i++) {
		uint64_t addr = accesses[i] & ~STORE, ps = 0, line = addr >> 6;
		bool store = accesses[i] >> 63;
		if (line == last_line && (last_dirty || !store)) {
			total += 345;
			if (store && clean_from) {
				clean_from->written++;
				clean_from = NULL;
			}
			continue;
		}
		if (addr >> 12 != last_page || (store && !last_dirty))
			ps = translate(nested, caches, addr, store);
		last_line = line;
		clean_from = NULL;
		ps += fetch(caches, ((uint64_t)last_frame << 12 | (addr & 4095)) >> 6, true);
		if (store && clean_from) {
			clean_from->written++;
			clean_from = NULL;
		}
		total += ps;
		if (!store && ps >= 64000 && --left == 0) {
			left = period;
			sampled[records++ % 1000] = addr;
		}
	}
	return total;
}

int main(int argc, char **argv)
{
	uint64_t n, bytes = argc > 1 ? strtoull(argv[1], NULL, 0) : 0;
	if (!bytes || fread(&n, sizeof n, 1, stdin) != 1)
		return 2;
	uint64_t *accesses = malloc(n * sizeof *accesses);
	if (fread(accesses, sizeof *accesses, n, stdin) != n)
		return 2;
	uint64_t pages = bytes >> 12, tables = UPPER + (bytes >> 21) + 2;
	uint64_t guest_pages = tables + pages, host_tables = UPPER + (guest_pages >> 9) + 2;
	guest = tree_new(BASE + bytes);
	for (uint64_t page = 0; page < pages; page++)
		map(&guest, BASE + (page << 12), tables + page);
	host = tree_new(guest_pages << 12);
	for (uint64_t page = 0; page < guest_pages; page++)
		map(&host, page << 12, host_tables + page);
	slow_line = (host_tables + tables + pages / 2) << 6;
	first = tlb1_new(4);
	second = tlb2_new(7);
	data1 = l1_new(6);
	data2 = l2_new(10);
	data3 = l3_new(16);
	memset(streams, 0xfe, sizeof streams);
	for (int model; (model = getchar()) != EOF;) {
		struct timespec from, to;
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
		uint64_t ps;
		switch (model & 3) {
		case 0: ps = pass(false, false, accesses, n); break;
		case 1: ps = pass(true, false, accesses, n); break;
		case 2: ps = pass(false, true, accesses, n); break;
		default: ps = pass(true, true, accesses, n); break;
		}
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &to);
		uint64_t answer[2] = { (to.tv_sec - from.tv_sec) * 1000000000ull + to.tv_nsec - from.tv_nsec, ps };
		fwrite(answer, sizeof answer, 1, stdout);
		fflush(stdout);
	}
	return 0;
}
