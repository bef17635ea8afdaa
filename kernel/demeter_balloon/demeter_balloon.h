/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * The ioctl interface of /dev/demeter_balloon.
 *
 * Addresses are guest-physical. Addresses and sizes are bytes, in multiples of the base page.
 * Every structure has the same layout for 32-bit and 64-bit programs. Fields called "reserved"
 * must be zero.
 */
#ifndef DEMETER_BALLOON_H
#define DEMETER_BALLOON_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Version of this interface. Different versions are incompatible. */
#define DEMETER_BALLOON_ABI 2

/* Length of a nonce. */
#define DEMETER_BALLOON_NONCE_BYTES 16

/* Maximum number of ranges in one call. */
#define DEMETER_BALLOON_RANGES_MAX 4096

/**
 * enum demeter_balloon_stop - reason why a call stopped
 * @DEMETER_BALLOON_DONE: the request was fulfilled
 * @DEMETER_BALLOON_LIMIT: the call reached its limit of work or @ranges_max; call again
 * @DEMETER_BALLOON_NO_MEMORY: the node has no memory to spare
 * @DEMETER_BALLOON_INTERRUPTED: a signal arrived
 * @DEMETER_BALLOON_EMPTY: no more pages are held there
 */
enum demeter_balloon_stop {
	DEMETER_BALLOON_DONE = 0,
	DEMETER_BALLOON_LIMIT = 1,
	DEMETER_BALLOON_NO_MEMORY = 2,
	DEMETER_BALLOON_INTERRUPTED = 3,
	DEMETER_BALLOON_EMPTY = 4,
};

/**
 * struct demeter_balloon_range - range of guest-physical memory
 * @start: first address
 * @bytes: length
 */
struct demeter_balloon_range {
	__aligned_u64 start;
	__aligned_u64 bytes;
};

/*
 * Let the kernel reclaim (or demote) other memory of the node if none is free. Without this flag,
 * only free memory above the high watermarks is taken, so that kswapd is not woken.
 */
#define DEMETER_BALLOON_RECLAIM (1u << 0)

/**
 * struct demeter_balloon_inflate - hold more memory of a node
 * @node: in: the NUMA node
 * @flags: in: 0 or DEMETER_BALLOON_RECLAIM
 * @bytes: in: size of the additional memory
 * @ranges: in: pointer to @ranges_max times struct demeter_balloon_range, for the newly held
 *	ranges, in no order
 * @ranges_max: in: 1 to DEMETER_BALLOON_RANGES_MAX
 * @ranges_count: out: number of ranges filled
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
 * @bytes: in: maximum size
 * @start: in: first address that may be given back
 * @end: in: end of that range, exclusive; all ones for no bound
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
 * struct demeter_balloon_list - list held memory of a node by address, in several calls
 * @node: in: the NUMA node
 * @ranges_max: in: 1 to DEMETER_BALLOON_RANGES_MAX
 * @ranges: in: pointer to @ranges_max times struct demeter_balloon_range
 * @cursor: in: 0 for the first call, then the previous call's value; out: value for the next call
 * @ranges_count: out: number of ranges filled
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
 * struct demeter_balloon_allow - set the out-of-memory allowance of a node
 * @node: in: the NUMA node
 * @reserved: zero
 * @bytes: in: held memory that the driver may give back when the kernel is out of memory, in total
 *	until the next such call; 0 after loading
 */
struct demeter_balloon_allow {
	__u32 node;
	__u32 reserved;
	__aligned_u64 bytes;
};

/**
 * struct demeter_balloon_prove - show the host a nonce in a node's memory
 * @node: in: the NUMA node
 * @reserved: zero
 * @nonce: in: written to the beginning of a page of the driver's own, which is never held
 * @page: out: address of that page
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
 * read(2) returns one __u64: the bytes given back since the driver was loaded because the kernel
 * was out of memory. It blocks until the number has changed since the file was opened or last
 * read; poll(2) reports the change.
 */

#endif
