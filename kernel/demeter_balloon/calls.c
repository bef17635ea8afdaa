// SPDX-License-Identifier: GPL-2.0-only
/*
 * The ioctls of /dev/demeter_balloon: checks all data of the calling program.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/nospec.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "balloon.h"

static struct balloon_node *find_node(u32 number)
{
	if (number >= nr_node_ids)
		return NULL;
	return balloon_nodes[array_index_nospec(number, nr_node_ids)];
}

static int alloc_ranges(struct balloon_ranges *ranges, u32 max)
{
	if (!max || max > DEMETER_BALLOON_RANGES_MAX)
		return -EINVAL;
	ranges->at = kvmalloc_array(max, sizeof(*ranges->at), GFP_KERNEL);
	ranges->count = 0;
	ranges->max = max;
	return ranges->at ? 0 : -ENOMEM;
}

static int copy_ranges(const struct balloon_ranges *ranges, u64 to)
{
	size_t bytes = ranges->count * sizeof(*ranges->at);

	return copy_to_user(u64_to_user_ptr(to), ranges->at, bytes) ? -EFAULT : 0;
}

static int inflate(struct demeter_balloon_inflate *call, struct balloon_ranges *ranges)
{
	const bool reclaim = call->flags & DEMETER_BALLOON_RECLAIM;
	struct balloon_node *node = find_node(call->node);
	unsigned long taken;

	if (!node || !node_state(node->nid, N_MEMORY))
		return -ENODEV;
	call->stop = balloon_take(node, call->bytes >> PAGE_SHIFT, reclaim, ranges, &taken);
	call->moved = (u64)taken << PAGE_SHIFT;
	call->ranges_count = ranges->count;
	return 0;
}

/* With a bad pointer the caller does not learn the new ranges. They stay held and can be listed. */
static long do_inflate(void __user *arg)
{
	struct demeter_balloon_inflate call;
	struct balloon_ranges ranges;
	int err;

	if (copy_from_user(&call, arg, sizeof(call)))
		return -EFAULT;
	if ((call.flags & ~DEMETER_BALLOON_RECLAIM) || call.reserved || !PAGE_ALIGNED(call.bytes))
		return -EINVAL;
	err = alloc_ranges(&ranges, call.ranges_max);
	if (err)
		return err;
	err = mutex_lock_interruptible(&balloon_lock);
	if (!err) {
		err = inflate(&call, &ranges);
		mutex_unlock(&balloon_lock);
	}
	if (!err)
		err = copy_ranges(&ranges, call.ranges);
	if (!err && copy_to_user(arg, &call, sizeof(call)))
		err = -EFAULT;
	kvfree(ranges.at);
	return err;
}

static int deflate(struct demeter_balloon_deflate *call)
{
	struct balloon_node *node = find_node(call->node);
	unsigned long given;

	if (!node)
		return -ENODEV;
	call->stop = balloon_give(node, call->start >> PAGE_SHIFT, (call->end - 1) >> PAGE_SHIFT,
				  call->bytes >> PAGE_SHIFT, &given);
	call->moved = (u64)given << PAGE_SHIFT;
	return 0;
}

static long do_deflate(void __user *arg)
{
	struct demeter_balloon_deflate call;
	int err;

	if (copy_from_user(&call, arg, sizeof(call)))
		return -EFAULT;
	if (call.reserved || call.reserved2 || !PAGE_ALIGNED(call.bytes) ||
	    !PAGE_ALIGNED(call.start) || (call.end != U64_MAX && !PAGE_ALIGNED(call.end)) ||
	    call.start >= call.end)
		return -EINVAL;
	err = mutex_lock_interruptible(&balloon_lock);
	if (!err) {
		err = deflate(&call);
		mutex_unlock(&balloon_lock);
	}
	if (!err && copy_to_user(arg, &call, sizeof(call)))
		err = -EFAULT;
	return err;
}

static int list(struct demeter_balloon_list *call, struct balloon_ranges *ranges)
{
	struct balloon_node *node = find_node(call->node);
	unsigned long cursor = call->cursor >> PAGE_SHIFT;

	if (!node)
		return -ENODEV;
	call->more = balloon_list(node, &cursor, ranges);
	call->cursor = PFN_PHYS(cursor);
	call->ranges_count = ranges->count;
	return 0;
}

static long do_list(void __user *arg)
{
	struct demeter_balloon_list call;
	struct balloon_ranges ranges;
	int err;

	if (copy_from_user(&call, arg, sizeof(call)))
		return -EFAULT;
	err = alloc_ranges(&ranges, call.ranges_max);
	if (err)
		return err;
	err = mutex_lock_interruptible(&balloon_lock);
	if (!err) {
		err = list(&call, &ranges);
		mutex_unlock(&balloon_lock);
	}
	if (!err)
		err = copy_ranges(&ranges, call.ranges);
	if (!err && copy_to_user(arg, &call, sizeof(call)))
		err = -EFAULT;
	kvfree(ranges.at);
	return err;
}

static long do_allow(void __user *arg)
{
	struct demeter_balloon_allow call;
	struct balloon_node *node;
	int err;

	if (copy_from_user(&call, arg, sizeof(call)))
		return -EFAULT;
	if (call.reserved)
		return -EINVAL;
	err = mutex_lock_interruptible(&balloon_lock);
	if (err)
		return err;
	node = find_node(call.node);
	if (node)
		node->oom_allowance_pages = call.bytes >> PAGE_SHIFT;
	mutex_unlock(&balloon_lock);
	return node ? 0 : -ENODEV;
}

static long do_prove(void __user *arg)
{
	struct demeter_balloon_prove call;
	struct balloon_node *node;
	int err;

	if (copy_from_user(&call, arg, sizeof(call)))
		return -EFAULT;
	if (call.reserved)
		return -EINVAL;
	err = mutex_lock_interruptible(&balloon_lock);
	if (err)
		return err;
	node = find_node(call.node);
	if (node && node_state(node->nid, N_MEMORY))
		err = balloon_prove(node, call.nonce, sizeof(call.nonce), &call.page);
	else
		err = -ENODEV;
	mutex_unlock(&balloon_lock);
	if (!err && copy_to_user(arg, &call, sizeof(call)))
		err = -EFAULT;
	return err;
}

/**
 * balloon_ioctl() - carry out one ioctl
 * @file: the device
 * @command: DEMETER_BALLOON_IOC_*
 * @arg: pointer to the call's structure
 *
 * Return: 0 or a negative error number.
 */
long balloon_ioctl(struct file *file, unsigned int command, unsigned long arg)
{
	void __user *user = (void __user *)arg;

	switch (command) {
	case DEMETER_BALLOON_IOC_ABI:
		return put_user(DEMETER_BALLOON_ABI, (u32 __user *)user);
	case DEMETER_BALLOON_IOC_INFLATE:
		return do_inflate(user);
	case DEMETER_BALLOON_IOC_DEFLATE:
		return do_deflate(user);
	case DEMETER_BALLOON_IOC_LIST:
		return do_list(user);
	case DEMETER_BALLOON_IOC_ALLOW:
		return do_allow(user);
	case DEMETER_BALLOON_IOC_PROVE:
		return do_prove(user);
	default:
		return -ENOTTY;
	}
}
