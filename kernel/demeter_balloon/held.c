// SPDX-License-Identifier: GPL-2.0-only
/*
 * Takes pages of a node, holds them and gives them back.
 *
 * Pages are taken in blocks of 2 MiB while there are any, then one by one. A block stays one
 * allocation until a part of it must go. Held pages are never written: the host may have punched
 * them out and would have to allocate new memory. They are marked PageOffline, so that dumps
 * (kcore, kdump) do not read them for the same reason.
 *
 * Held pages cannot be migrated (balloon compaction) on purpose. The host has checked every page by
 * its address and may be punching it at this moment. Before a page could move, the host would have
 * to agree, while compaction waits with locks held. A guest could then drive the host by its own
 * compaction. The price: memory with held pages cannot be taken offline, no page is taken from
 * ZONE_MOVABLE, and single pages fragment the guest.
 *
 * To limit fragmentation, blocks of a whole pageblock are taken first and single pages are given
 * back first. Single pages are taken only for a remainder below a block, or without free blocks.
 * Held pages are subtracted from the page allocator's managed pages, so that MemTotal is the
 * guest's own memory and watermarks can follow it.
 *
 * The caller holds the driver's mutex.
 */
#include <linux/gfp.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/page-flags.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/string.h>
#include <linux/vmstat.h>

#include "balloon.h"

#define BLOCK_ORDER get_order(SZ_2M)
#define BLOCK_PAGES (1UL << BLOCK_ORDER)

/* Kinds of entries in balloon_node.pages. */
#define MARK_PAGE XA_MARK_0
#define MARK_BLOCK XA_MARK_1

/* Maximum number of pages that one call takes or gives back. */
#define CALL_PAGES_MAX (SZ_256M >> PAGE_SHIFT)

/* Maximum number of entries that one call lists. */
#define CALL_ENTRIES_MAX 65536

/*
 * Allocate on this node only, without warnings and not at the cost of others: no retries, no
 * reserves, and no reclaim unless requested.
 */
#define GFP_HELD (__GFP_HIGHMEM | __GFP_THISNODE | __GFP_NOWARN | __GFP_NORETRY | __GFP_NOMEMALLOC)
#define GFP_HELD_RECLAIM (GFP_HELD | __GFP_RECLAIM | __GFP_IO | __GFP_FS)

/*
 * Single pages that spare_pages() allows must not fail because of a watermark boost. With
 * __GFP_HIGH the page allocator checks the watermark without the boost.
 */
#define GFP_HELD_PAGE (GFP_HELD | __GFP_HIGH)

/* For bookkeeping. Must not invoke the OOM killer, whose notifier needs our mutex. */
#define GFP_BOOKS (GFP_KERNEL | __GFP_NOWARN | __GFP_NORETRY)

/*
 * Free pages of a node that can be taken without waking its kswapd. The high watermark is used
 * without its boost, which high_wmark_pages() would add. The kernel boosts a zone's watermarks by
 * up to 150 % until kswapd has run, whenever an allocation falls back to a block of another migrate
 * type. The first single page after whole blocks does that. On a busy machine the boost lasts for a
 * while, and the call would find no spare memory although a hundred megabytes are free.
 */
static unsigned long spare_pages(int nid)
{
	const enum zone_type top = gfp_zone(GFP_HELD);
	struct zone *zone = NODE_DATA(nid)->node_zones;
	unsigned long spare = 0;
	enum zone_type i;

	for (i = 0; i <= top; i++, zone++) {
		unsigned long free = zone_page_state(zone, NR_FREE_PAGES);
		unsigned long keep = zone->_watermark[WMARK_HIGH] + zone->lowmem_reserve[top];

		if (free > keep)
			spare += free - keep;
	}
	return spare;
}

static int enter(struct balloon_node *node, unsigned long pfn, unsigned int order)
{
	int err = xa_err(xa_store(&node->pages, pfn, xa_mk_value(order), GFP_BOOKS));

	if (err)
		return err;
	xa_clear_mark(&node->pages, pfn, order ? MARK_PAGE : MARK_BLOCK);
	xa_set_mark(&node->pages, pfn, order ? MARK_BLOCK : MARK_PAGE);
	return 0;
}

static int take_one(struct balloon_node *node, unsigned int order, bool reclaim,
		    unsigned long *pfn)
{
	const unsigned long count = 1UL << order;
	/* Reclaim for whole blocks would be a storm. */
	const bool may_reclaim = reclaim && !order;
	gfp_t gfp = may_reclaim ? GFP_HELD_RECLAIM : order ? GFP_HELD : GFP_HELD_PAGE;
	struct page *page;
	unsigned long i;
	int err;

	if (!may_reclaim && spare_pages(node->nid) < count)
		return -ENOMEM;
	page = alloc_pages_node(node->nid, gfp, order);
	if (!page)
		return -ENOMEM;
	*pfn = page_to_pfn(page);
	err = enter(node, *pfn, order);
	if (err) {
		__free_pages(page, order);
		return err;
	}
	for (i = 0; i < count; i++)
		__SetPageOffline(pfn_to_page(*pfn + i));
	adjust_managed_page_count(page, -(long)count);
	node->held_pages += count;
	node->inflated_pages += count;
	if (order)
		node->held_block_pages += count;
	return 0;
}

static void give_one(struct balloon_node *node, unsigned long pfn, unsigned int order)
{
	const unsigned long count = 1UL << order;
	unsigned long i;

	xa_erase(&node->pages, pfn);
	for (i = 0; i < count; i++)
		__ClearPageOffline(pfn_to_page(pfn + i));
	adjust_managed_page_count(pfn_to_page(pfn), count);
	__free_pages(pfn_to_page(pfn), order);
	node->held_pages -= count;
	node->deflated_pages += count;
	if (order)
		node->held_block_pages -= count;
}

/* Splits a held block into single held pages, or fails without a change. */
static int split(struct balloon_node *node, unsigned long pfn)
{
	unsigned long i;
	int err;

	for (i = 1; i < BLOCK_PAGES; i++) {
		err = enter(node, pfn + i, 0);
		if (err) {
			while (--i)
				xa_erase(&node->pages, pfn + i);
			return err;
		}
	}
	/* Replaces the block's own entry, so it needs no memory. */
	err = enter(node, pfn, 0);
	if (WARN_ON_ONCE(err))
		return err;
	split_page(pfn_to_page(pfn), BLOCK_ORDER);
	node->held_block_pages -= BLOCK_PAGES;
	return 0;
}

/* Appends memory, merged with an adjacent last range. There must be space for one more range. */
static void append(struct balloon_ranges *ranges, unsigned long pfn, unsigned int order)
{
	const u64 start = PFN_PHYS(pfn);
	const u64 bytes = PAGE_SIZE << order;
	struct demeter_balloon_range *last;

	if (ranges->count) {
		last = &ranges->at[ranges->count - 1];
		if (last->start + last->bytes == start) {
			last->bytes += bytes;
			return;
		}
		if (start + bytes == last->start) {
			last->start = start;
			last->bytes += bytes;
			return;
		}
	}
	ranges->at[ranges->count].start = start;
	ranges->at[ranges->count].bytes = bytes;
	ranges->count++;
}

/**
 * balloon_take() - hold more pages of a node
 * @node: the node, which must have memory
 * @wanted: number of pages
 * @reclaim: whether the kernel may reclaim memory for them
 * @ranges: receives the newly held ranges
 * @taken: receives the number of newly held pages
 *
 * Return: reason why it stopped (enum demeter_balloon_stop).
 */
u32 balloon_take(struct balloon_node *node, unsigned long wanted, bool reclaim,
		 struct balloon_ranges *ranges, unsigned long *taken)
{
	unsigned int order = BLOCK_ORDER;
	unsigned long pfn;

	*taken = 0;
	while (*taken < wanted) {
		if (*taken >= CALL_PAGES_MAX || ranges->count == ranges->max)
			return DEMETER_BALLOON_LIMIT;
		if (signal_pending(current))
			return DEMETER_BALLOON_INTERRUPTED;
		if (wanted - *taken < BLOCK_PAGES)
			order = 0;
		if (!take_one(node, order, reclaim, &pfn)) {
			append(ranges, pfn, order);
			*taken += 1UL << order;
		} else if (order) {
			order = 0;
		} else {
			return DEMETER_BALLOON_NO_MEMORY;
		}
		cond_resched();
	}
	return DEMETER_BALLOON_DONE;
}

/* The first block that overlaps [first, last], if any. */
static bool find_block(struct balloon_node *node, unsigned long first, unsigned long last,
		       unsigned long *pfn)
{
	*pfn = round_down(first, BLOCK_PAGES);
	return xa_find(&node->pages, pfn, last, MARK_BLOCK);
}

/**
 * balloon_give() - give held pages of a node back
 * @node: the node
 * @first: first page frame that may be given back
 * @last: last page frame that may be given back
 * @wanted: maximum number of pages
 * @given: receives the number of pages given back
 *
 * Single pages go first, so that blocks stay whole.
 *
 * Return: reason why it stopped (enum demeter_balloon_stop).
 */
u32 balloon_give(struct balloon_node *node, unsigned long first, unsigned long last,
		 unsigned long wanted, unsigned long *given)
{
	unsigned long pfn;

	*given = 0;
	while (*given < wanted) {
		if (*given >= CALL_PAGES_MAX)
			return DEMETER_BALLOON_LIMIT;
		if (signal_pending(current))
			return DEMETER_BALLOON_INTERRUPTED;
		pfn = first;
		if (xa_find(&node->pages, &pfn, last, MARK_PAGE)) {
			give_one(node, pfn, 0);
			*given += 1;
		} else if (!find_block(node, first, last, &pfn)) {
			return DEMETER_BALLOON_EMPTY;
		} else if (pfn >= first && pfn + (BLOCK_PAGES - 1) <= last &&
			   wanted - *given >= BLOCK_PAGES) {
			give_one(node, pfn, BLOCK_ORDER);
			*given += BLOCK_PAGES;
		} else if (split(node, pfn)) {
			return DEMETER_BALLOON_NO_MEMORY;
		}
		cond_resched();
	}
	return DEMETER_BALLOON_DONE;
}

/**
 * balloon_give_whole() - give held pages back without allocating memory
 * @node: the node
 * @wanted: maximum number of pages
 *
 * Return: number of pages given back.
 */
unsigned long balloon_give_whole(struct balloon_node *node, unsigned long wanted)
{
	unsigned long given = 0;

	while (given < wanted) {
		unsigned long pfn = 0;

		if (xa_find(&node->pages, &pfn, ULONG_MAX, MARK_PAGE)) {
			give_one(node, pfn, 0);
			given++;
		} else if (wanted - given >= BLOCK_PAGES && find_block(node, 0, ULONG_MAX, &pfn)) {
			give_one(node, pfn, BLOCK_ORDER);
			given += BLOCK_PAGES;
		} else {
			break;
		}
	}
	return given;
}

/**
 * balloon_prove() - show the host a nonce in this machine's memory
 * @node: the node, which must have memory
 * @nonce: bytes that the host will look for
 * @bytes: length of @nonce
 * @page: receives the address of the page that begins with @nonce
 *
 * Return: 0 or a negative error number.
 */
int balloon_prove(struct balloon_node *node, const void *nonce, size_t bytes, u64 *page)
{
	const gfp_t gfp = GFP_KERNEL | __GFP_THISNODE | __GFP_ZERO | __GFP_NOWARN | __GFP_NORETRY;

	if (!node->own_page)
		node->own_page = alloc_pages_node(node->nid, gfp, 0);
	if (!node->own_page)
		return -ENOMEM;
	memcpy(page_address(node->own_page), nonce, bytes);
	*page = page_to_phys(node->own_page);
	return 0;
}

/**
 * balloon_list() - list held memory of a node by address
 * @node: the node
 * @cursor: first page frame; receives the first one of the next call
 * @ranges: receives the ranges
 *
 * Return: whether there may be more.
 */
bool balloon_list(struct balloon_node *node, unsigned long *cursor, struct balloon_ranges *ranges)
{
	unsigned int entries = 0;
	unsigned long pfn;
	void *entry;

	xa_for_each_start(&node->pages, pfn, entry, *cursor) {
		unsigned int order = xa_to_value(entry);

		if (ranges->count == ranges->max || entries++ == CALL_ENTRIES_MAX)
			return true;
		append(ranges, pfn, order);
		*cursor = pfn + (1UL << order);
		cond_resched();
	}
	return false;
}

/**
 * balloon_give_all() - give all held pages back
 * @node: the node
 */
void balloon_give_all(struct balloon_node *node)
{
	unsigned long pfn;
	void *entry;

	xa_for_each(&node->pages, pfn, entry) {
		give_one(node, pfn, xa_to_value(entry));
		cond_resched();
	}
}
