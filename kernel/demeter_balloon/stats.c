// SPDX-License-Identifier: GPL-2.0-only
/*
 * Creates and destroys nodes, and shows their statistics in sysfs:
 * /sys/class/misc/demeter_balloon/nodeN/, one number of bytes in each file.
 */
#include <linux/kobject.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "balloon.h"

#define BYTES_ATTR(name)								\
static ssize_t name##_bytes_show(struct kobject *kobj, struct kobj_attribute *attr,	\
				 char *buf)						\
{											\
	struct balloon_node *node = container_of(kobj, struct balloon_node, kobj);	\
	u64 pages = READ_ONCE(node->name##_pages);					\
											\
	return sysfs_emit(buf, "%llu\n", pages << PAGE_SHIFT);				\
}											\
static struct kobj_attribute name##_bytes = __ATTR_RO(name##_bytes)

BYTES_ATTR(held);
BYTES_ATTR(held_block);
BYTES_ATTR(inflated);
BYTES_ATTR(deflated);
BYTES_ATTR(oom_returned);
BYTES_ATTR(oom_allowance);

static struct attribute *node_attrs[] = {
	&held_bytes.attr,
	&held_block_bytes.attr,
	&inflated_bytes.attr,
	&deflated_bytes.attr,
	&oom_returned_bytes.attr,
	&oom_allowance_bytes.attr,
	NULL,
};
ATTRIBUTE_GROUPS(node);

static void node_release(struct kobject *kobj)
{
	struct balloon_node *node = container_of(kobj, struct balloon_node, kobj);

	xa_destroy(&node->pages);
	if (node->own_page)
		__free_page(node->own_page);
	kfree(node);
}

static const struct kobj_type node_type = {
	.release = node_release,
	.sysfs_ops = &kobj_sysfs_ops,
	.default_groups = node_groups,
};

/**
 * balloon_node_create() - create a node without held pages, and its directory in sysfs
 * @nid: the node's number
 * @parent: the device's directory
 *
 * Return: the node, or an error pointer.
 */
struct balloon_node *balloon_node_create(int nid, struct kobject *parent)
{
	struct balloon_node *node = kzalloc(sizeof(*node), GFP_KERNEL);
	int err;

	if (!node)
		return ERR_PTR(-ENOMEM);
	node->nid = nid;
	xa_init(&node->pages);
	err = kobject_init_and_add(&node->kobj, &node_type, parent, "node%d", nid);
	if (err) {
		kobject_put(&node->kobj);
		return ERR_PTR(err);
	}
	return node;
}

/**
 * balloon_node_destroy() - give all pages back and free the node
 * @node: the node
 */
void balloon_node_destroy(struct balloon_node *node)
{
	balloon_give_all(node);
	kobject_del(&node->kobj);
	kobject_put(&node->kobj);
}
