/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * What programs say to /dev/demeter_balloon.
 *
 * Memory is named by guest-physical address in bytes. All of it is in units of the base page.
 * Every structure has the same layout for 32-bit and 64-bit programs. Fields called "reserved"
 * must be zero.
 */
#ifndef DEMETER_BALLOON_H
#define DEMETER_BALLOON_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* The version of this interface; another number means another, incompatible one. */
#define DEMETER_BALLOON_ABI 2

/* How long a nonce is. */
#define DEMETER_BALLOON_NONCE_BYTES 16

/* The most ranges that one call takes or fills. */
#define DEMETER_BALLOON_RANGES_MAX 4096

/**
 * enum demeter_balloon_stop - why a call did no more
 * @DEMETER_BALLOON_DONE: all was done
 * @DEMETER_BALLOON_LIMIT: the call reached its limit of work or the caller's of ranges; call again
 * @DEMETER_BALLOON_NO_MEMORY: the node has no memory to spare
 * @DEMETER_BALLOON_INTERRUPTED: a signal arrived
 * @DEMETER_BALLOON_EMPTY: nothing more is held there
 */
enum demeter_balloon_stop {
	DEMETER_BALLOON_DONE = 0,
	DEMETER_BALLOON_LIMIT = 1,
	DEMETER_BALLOON_NO_MEMORY = 2,
	DEMETER_BALLOON_INTERRUPTED = 3,
	DEMETER_BALLOON_EMPTY = 4,
};

/**
 * struct demeter_balloon_range - guest-physical memory
 * @start: first address
 * @bytes: length
 */
struct demeter_balloon_range {
	__aligned_u64 start;
	__aligned_u64 bytes;
};

/*
 * Let the kernel reclaim (or demote) other memory of the node where none is free. Without it only
 * what is free above the high watermarks is taken, so that reclaim stays asleep.
 */
#define DEMETER_BALLOON_RECLAIM (1u << 0)

/**
 * struct demeter_balloon_inflate - hold more memory of a node
 * @node: in: the NUMA node
 * @flags: in: 0 or DEMETER_BALLOON_RECLAIM
 * @bytes: in: how much more
 * @ranges: in: pointer to @ranges_max times struct demeter_balloon_range, for what is newly held,
 *	in no order
 * @ranges_max: in: 1 to DEMETER_BALLOON_RANGES_MAX
 * @ranges_count: out: how many were filled
 * @moved: out: bytes newly held
 * @stop: out: enum demeter_balloon_stop
 * @reserved: zero
 */
struct demeter_balloon_inflate {
	__u32 node;
	__u32 flags;
	__aligned_u64 bytes;
	__aligned_u64 ranges;
	__u32 ranges_max;
	__u32 ranges_count;
	__aligned_u64 moved;
	__u32 stop;
	__u32 reserved;
};

/**
 * struct demeter_balloon_deflate - give held memory back to the kernel
 * @node: in: the NUMA node
 * @reserved: zero
 * @bytes: in: how much at the most
 * @start: in: only memory at or above this address
 * @end: in: only memory below this address; all ones for no bound
 * @moved: out: bytes given back
 * @stop: out: enum demeter_balloon_stop
 * @reserved2: zero
 */
struct demeter_balloon_deflate {
	__u32 node;
	__u32 reserved;
	__aligned_u64 bytes;
	__aligned_u64 start;
	__aligned_u64 end;
	__aligned_u64 moved;
	__u32 stop;
	__u32 reserved2;
};

/**
 * struct demeter_balloon_list - what is held of a node, by address, in several calls
 * @node: in: the NUMA node
 * @ranges_max: in: 1 to DEMETER_BALLOON_RANGES_MAX
 * @ranges: in: pointer to @ranges_max times struct demeter_balloon_range
 * @cursor: in: 0 for the first call, then as the call before left it; out: where to go on
 * @ranges_count: out: how many were filled
 * @more: out: 1 if there may be more, 0 at the end
 */
struct demeter_balloon_list {
	__u32 node;
	__u32 ranges_max;
	__aligned_u64 ranges;
	__aligned_u64 cursor;
	__u32 ranges_count;
	__u32 more;
};

/**
 * struct demeter_balloon_allow - how much the driver may give back by itself
 * @node: in: the NUMA node
 * @reserved: zero
 * @bytes: in: so much of this node may be given back when the kernel is out of memory, in total,
 *	until the next such call; 0 at first
 */
struct demeter_balloon_allow {
	__u32 node;
	__u32 reserved;
	__aligned_u64 bytes;
};

/**
 * struct demeter_balloon_prove - show the host whose memory a node is
 * @node: in: the NUMA node
 * @reserved: zero
 * @nonce: in: what to write to the beginning of a page of the driver's own, which is never held
 * @page: out: where that page lies
 */
struct demeter_balloon_prove {
	__u32 node;
	__u32 reserved;
	__u8 nonce[DEMETER_BALLOON_NONCE_BYTES];
	__aligned_u64 page;
};

#define DEMETER_BALLOON_IOC_ABI _IOR(0xde, 0, __u32)
#define DEMETER_BALLOON_IOC_INFLATE _IOWR(0xde, 1, struct demeter_balloon_inflate)
#define DEMETER_BALLOON_IOC_DEFLATE _IOWR(0xde, 2, struct demeter_balloon_deflate)
#define DEMETER_BALLOON_IOC_LIST _IOWR(0xde, 3, struct demeter_balloon_list)
#define DEMETER_BALLOON_IOC_ALLOW _IOW(0xde, 4, struct demeter_balloon_allow)
#define DEMETER_BALLOON_IOC_PROVE _IOWR(0xde, 5, struct demeter_balloon_prove)

/*
 * read(2) yields one __u64: the bytes given back for lack of memory since the driver was loaded,
 * once it has changed since the file was opened or last read. poll(2) says when.
 */

#endif
