/* SPDX-License-Identifier: GPL-2.0-only */
/* Declarations shared by the driver's source files. */
#ifndef BALLOON_H
#define BALLOON_H

#include <linux/fs.h>
#include <linux/kobject.h>
#include <linux/mutex.h>
#include <linux/types.h>
#include <linux/xarray.h>

#include "demeter_balloon.h"

/**
 * struct balloon_node - held pages of one NUMA node
 * @kobj: the node's directory in sysfs; owns this structure
 * @nid: the node's number
 * @pages: maps the page frame number of each held block or page to its order; marked by kind
 * @own_page: page of the node that shows nonces; NULL until the first one
 * @held_pages: pages held now
 * @held_block_pages: held pages in whole blocks
 * @inflated_pages: pages taken since the driver was loaded
 * @deflated_pages: pages given back since then, including @oom_returned_pages
 * @oom_returned_pages: pages given back since then because the kernel was out of memory
 * @oom_allowance_pages: pages that may still be given back for that reason
 *
 * The driver's mutex guards all fields. Statistics are read without it.
 */
struct balloon_node {
	struct kobject kobj;
	int nid;
	struct xarray pages;
	struct page *own_page;
	unsigned long held_pages;
	unsigned long held_block_pages;
	unsigned long inflated_pages;
	unsigned long deflated_pages;
	unsigned long oom_returned_pages;
	unsigned long oom_allowance_pages;
};

/**
 * struct balloon_ranges - buffer of ranges for the caller
 * @at: space for @max ranges
 * @count: number of ranges in the buffer
 * @max: capacity of the buffer
 */
struct balloon_ranges {
	struct demeter_balloon_range *at;
	u32 count;
	u32 max;
};

/* device.c */
/* Guards all state of the driver. */
extern struct mutex balloon_lock;
/* Nodes by number; NULL for a node that the machine cannot have. */
extern struct balloon_node **balloon_nodes;

/* calls.c */
long balloon_ioctl(struct file *file, unsigned int command, unsigned long arg);

/* held.c */
u32 balloon_take(struct balloon_node *node, unsigned long wanted, bool reclaim,
		 struct balloon_ranges *ranges, unsigned long *taken);
u32 balloon_give(struct balloon_node *node, unsigned long first, unsigned long last,
		 unsigned long wanted, unsigned long *given);
unsigned long balloon_give_whole(struct balloon_node *node, unsigned long wanted);
int balloon_prove(struct balloon_node *node, const void *nonce, size_t bytes, u64 *page);
bool balloon_list(struct balloon_node *node, unsigned long *cursor, struct balloon_ranges *ranges);
void balloon_give_all(struct balloon_node *node);

/* stats.c */
struct balloon_node *balloon_node_create(int nid, struct kobject *parent);
void balloon_node_destroy(struct balloon_node *node);

#endif
