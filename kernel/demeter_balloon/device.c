// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/demeter_balloon: a balloon for each NUMA node, inflated and deflated by ioctl.
 *
 * A program in the guest (Demeter's agent) takes orders from the host. It has this driver hold
 * memory of one tier and reports the pages, so that the host can use them elsewhere. Held pages
 * belong to the driver, not to the program that asked for them. They stay held until a program
 * deflates the balloon or the module is unloaded. When the kernel runs out of memory, the driver
 * gives back pages up to its allowance.
 *
 * One mutex guards all state. The OOM notifier only tries to take it, so that it never waits for a
 * call that waits for memory.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/oom.h>
#include <linux/poll.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/wait.h>

#include "balloon.h"

#ifndef CONFIG_64BIT
#error "guest-physical addresses must fit a long: this driver is for 64-bit kernels"
#endif

/* Maximum number of pages that one OOM notification gives back. */
#define OOM_PAGES_MAX (SZ_32M >> PAGE_SHIFT)

DEFINE_MUTEX(balloon_lock);
struct balloon_node **balloon_nodes;

/* Pages given back because the kernel was out of memory, and readers that wait for a change. */
static atomic_long_t oom_returned_pages;
static DECLARE_WAIT_QUEUE_HEAD(oom_returned_wait);

/**
 * struct reader - one open file of the device
 * @seen_pages: value of oom_returned_pages that was read last
 */
struct reader {
	long seen_pages;
};

/*
 * Whether initialization is complete. The device must exist earlier, because the nodes' directories
 * lie below its own. But it cannot be opened earlier: if initialization fails, the module goes away
 * and no file may be open.
 */
static bool balloon_ready;

static int balloon_open(struct inode *inode, struct file *file)
{
	struct reader *reader;

	/* Held memory is missing for all users, so the device file's owner and mode are not enough. */
	if (!capable(CAP_SYS_RESOURCE))
		return -EPERM;
	if (!smp_load_acquire(&balloon_ready))
		return -EAGAIN;
	reader = kzalloc(sizeof(*reader), GFP_KERNEL);
	if (!reader)
		return -ENOMEM;
	reader->seen_pages = atomic_long_read(&oom_returned_pages);
	file->private_data = reader;
	return 0;
}

static int balloon_release(struct inode *inode, struct file *file)
{
	kfree(file->private_data);
	return 0;
}

static bool has_news(const struct reader *reader)
{
	return atomic_long_read(&oom_returned_pages) != READ_ONCE(reader->seen_pages);
}

static ssize_t balloon_read(struct file *file, char __user *to, size_t bytes, loff_t *at)
{
	struct reader *reader = file->private_data;
	long pages;
	u64 told;
	int err;

	if (bytes < sizeof(told))
		return -EINVAL;
	if (!has_news(reader)) {
		if (file->f_flags & O_NONBLOCK)
			return -EAGAIN;
		err = wait_event_interruptible(oom_returned_wait, has_news(reader));
		if (err)
			return err;
	}
	pages = atomic_long_read(&oom_returned_pages);
	told = (u64)pages << PAGE_SHIFT;
	if (copy_to_user(to, &told, sizeof(told)))
		return -EFAULT;
	WRITE_ONCE(reader->seen_pages, pages);
	return sizeof(told);
}

static __poll_t balloon_poll(struct file *file, struct poll_table_struct *table)
{
	poll_wait(file, &oom_returned_wait, table);
	return has_news(file->private_data) ? EPOLLIN | EPOLLRDNORM : 0;
}

static const struct file_operations balloon_fops = {
	.owner = THIS_MODULE,
	.open = balloon_open,
	.release = balloon_release,
	.read = balloon_read,
	.poll = balloon_poll,
	.unlocked_ioctl = balloon_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice balloon_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "demeter_balloon",
	.fops = &balloon_fops,
	.mode = 0600,
};

/*
 * The kernel is out of memory. Do nothing during a call: a call that inflates the balloon would
 * take the returned pages again.
 */
static int on_oom(struct notifier_block *self, unsigned long unused, void *freed)
{
	unsigned long left = OOM_PAGES_MAX;
	int nid;

	if (!mutex_trylock(&balloon_lock))
		return NOTIFY_OK;
	for_each_node(nid) {
		struct balloon_node *node = balloon_nodes[nid];
		unsigned long given;

		given = balloon_give_whole(node, min(left, node->oom_allowance_pages));
		node->oom_allowance_pages -= given;
		node->oom_returned_pages += given;
		left -= given;
	}
	mutex_unlock(&balloon_lock);
	if (left < OOM_PAGES_MAX) {
		*(unsigned long *)freed += OOM_PAGES_MAX - left;
		atomic_long_add(OOM_PAGES_MAX - left, &oom_returned_pages);
		wake_up_interruptible(&oom_returned_wait);
	}
	return NOTIFY_OK;
}

static struct notifier_block oom_block = { .notifier_call = on_oom };

static void destroy_nodes(void)
{
	int nid;

	for_each_node(nid) {
		if (balloon_nodes[nid])
			balloon_node_destroy(balloon_nodes[nid]);
	}
}

static int __init create_nodes(struct kobject *parent)
{
	struct balloon_node *node;
	int nid;

	for_each_node(nid) {
		node = balloon_node_create(nid, parent);
		if (IS_ERR(node))
			return PTR_ERR(node);
		mutex_lock(&balloon_lock);
		balloon_nodes[nid] = node;
		mutex_unlock(&balloon_lock);
	}
	return 0;
}

static int __init balloon_init(void)
{
	int err;

	balloon_nodes = kcalloc(nr_node_ids, sizeof(*balloon_nodes), GFP_KERNEL);
	if (!balloon_nodes)
		return -ENOMEM;
	err = misc_register(&balloon_device);
	if (err)
		goto free;
	err = create_nodes(&balloon_device.this_device->kobj);
	if (!err)
		err = register_oom_notifier(&oom_block);
	if (!err) {
		/* No step after this can fail. Pairs with balloon_open(). */
		smp_store_release(&balloon_ready, true);
		if (want_init_on_alloc(GFP_KERNEL))
			pr_info("this kernel clears pages before we hold them, which takes long; boot it with init_on_alloc=0 to avoid that\n");
		return 0;
	}
	destroy_nodes();
	misc_deregister(&balloon_device);
free:
	kfree(balloon_nodes);
	return err;
}
module_init(balloon_init);

static void __exit balloon_exit(void)
{
	unregister_oom_notifier(&oom_block);
	destroy_nodes();
	misc_deregister(&balloon_device);
	kfree(balloon_nodes);
}
module_exit(balloon_exit);

MODULE_DESCRIPTION("Demeter's balloon: memory of each NUMA node, held for the host");
MODULE_AUTHOR("The Demeter authors");
MODULE_LICENSE("GPL");
