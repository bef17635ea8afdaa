// SPDX-License-Identifier: GPL-2.0-only
/*
 * A QEMU plugin that records the memory accesses of a program in user-mode emulation.
 *
 *   qemu-x86_64 -plugin demeter_trace.so,fd=N PROGRAM
 *
 *   -plugin demeter_trace.so,check=on
 *
 * only makes the emulator exit with success, which shows that it can load the plugin.
 *
 * fd   an inherited stream socket for messages in native byte order. A message has the thread
 *      (4 bytes), the number n of accesses (4 bytes), the instructions executed meanwhile
 *      (8 bytes), and n times 8 bytes: the address, with bit 63 for a store. The last message has
 *      thread UINT32_MAX and n = 0.
 *
 * The plugin records all threads of the started process. It does not record forked children, nor
 * a program that replaces the process by exec. If the reader closes the socket, the program
 * continues without recording.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "qemu_plugin.h"

#define THREADS_MAX 1024
#define MESSAGE_ACCESSES 4096
#define STORE (1ull << 63)
#define END UINT32_MAX

struct header {
	uint32_t thread;
	uint32_t count;
	uint64_t instructions;
};

struct message {
	struct header header;
	uint64_t accesses[MESSAGE_ACCESSES];
};

/* Only its own thread fills a message. */
static struct message *messages[THREADS_MAX];
static pthread_mutex_t sending = PTHREAD_MUTEX_INITIALIZER;
static int fd = -1;
static pid_t owner;
static bool deaf; /* the reader has closed the socket */

/* MSG_NOSIGNAL: the program would get a SIGPIPE. */
static void send_all(const void *bytes, size_t left)
{
	const char *at = bytes;

	while (left && !__atomic_load_n(&deaf, __ATOMIC_RELAXED)) {
		ssize_t sent = send(fd, at, left, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent <= 0) {
			__atomic_store_n(&deaf, true, __ATOMIC_RELAXED);
			return;
		}
		at += sent;
		left -= (size_t)sent;
	}
}

/* Sends the buffered accesses. */
static void tell(struct message *message)
{
	/* At the program's end its thread may still append, so the count is read only once. */
	struct header header = message->header;

	/* A forked child has a copy of everything, including the socket and a lock that may be held. */
	if (getpid() != owner) {
		__atomic_store_n(&deaf, true, __ATOMIC_RELAXED);
		return;
	}
	pthread_mutex_lock(&sending);
	send_all(&header, sizeof(header));
	send_all(message->accesses, header.count * sizeof(uint64_t));
	pthread_mutex_unlock(&sending);
	message->header.count = 0;
	message->header.instructions = 0;
}

/* The message of this thread; NULL if there are too many threads or no memory. */
static struct message *message_of(unsigned int vcpu)
{
	if (vcpu >= THREADS_MAX)
		return NULL;
	if (!messages[vcpu]) {
		messages[vcpu] = calloc(1, sizeof(struct message));
		if (messages[vcpu])
			messages[vcpu]->header.thread = vcpu;
	}
	return messages[vcpu];
}

static void on_access(unsigned int vcpu, qemu_plugin_meminfo_t info, uint64_t gva, void *unused)
{
	struct message *message;
	uint32_t *count;

	(void)unused;
	if (__atomic_load_n(&deaf, __ATOMIC_RELAXED) || !(message = message_of(vcpu)))
		return;
	count = &message->header.count;
	message->accesses[(*count)++] = qemu_plugin_mem_is_store(info) ? gva | STORE : gva;
	if (*count == MESSAGE_ACCESSES)
		tell(message);
}

static void on_block(unsigned int vcpu, void *instructions)
{
	struct message *message = message_of(vcpu);

	if (message)
		message->header.instructions += (uintptr_t)instructions;
}

static void on_translate(struct qemu_plugin_tb *tb)
{
	size_t count = qemu_plugin_tb_n_insns(tb);

	qemu_plugin_register_vcpu_tb_exec_cb(tb, on_block, QEMU_PLUGIN_CB_NO_REGS,
					     (void *)(uintptr_t)count);
	for (size_t i = 0; i < count; i++)
		qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(tb, i), on_access,
						 QEMU_PLUGIN_CB_NO_REGS, QEMU_PLUGIN_MEM_RW, NULL);
}
QEMU_PLUGIN_TB_TRANS_CB(on_translate)

/* QEMU reuses the number of an exited thread. */
static void on_thread_exit(unsigned int vcpu)
{
	if (vcpu < THREADS_MAX && messages[vcpu])
		tell(messages[vcpu]);
}
QEMU_PLUGIN_VCPU_CB(on_thread_exit)

static void on_program_exit(void)
{
	static struct message end = { .header.thread = END };

	for (unsigned int i = 0; i < THREADS_MAX; i++) {
		if (messages[i])
			tell(messages[i]);
	}
	tell(&end);
}
QEMU_PLUGIN_ATEXIT_CB(on_program_exit)

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	if (info->system_emulation) {
		fprintf(stderr, "demeter_trace: only user-mode emulation is supported\n");
		return 1;
	}
	if (argc == 1 && !strcmp(argv[0], "check=on"))
		_exit(EXIT_SUCCESS);
	if (argc != 1 || sscanf(argv[0], "fd=%d", &fd) != 1 ||
	    fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
		fprintf(stderr, "demeter_trace: needs fd=NUMBER of an open socket\n");
		return 1;
	}
	owner = getpid();
	qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate_cb QEMU_PLUGIN_NO_USERDATA);
	qemu_plugin_register_vcpu_exit_cb(id, on_thread_exit_cb QEMU_PLUGIN_NO_USERDATA);
	qemu_plugin_register_atexit_cb(id, on_program_exit_cb, NULL);
	return 0;
}
