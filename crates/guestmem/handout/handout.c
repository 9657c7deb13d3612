/*
 * Hands out userfaultfds from inside QEMU. Loaded by LD_PRELOAD, before main().
 *
 * A userfaultfd watches the process that makes it, so the VM process cannot make one for QEMU.
 * This library keeps one thread that waits on an inherited listening Unix socket; each
 * connection gets a fresh descriptor and a short reply, then it is closed. The VM process may
 * die and come back: its successor simply connects again.
 *
 * What it never does: print, exit, allocate, take a signal, wait for its peer, or keep a
 * descriptor. Whatever goes wrong costs that one connection and nothing else.
 *
 * It lives under QEMU's seccomp filter from the moment QEMU installs it for all threads: only
 * accept4, getsockopt, ioctl, sendmsg, close and poll are called in the loop.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

#define REPLY_MAGIC 0x46555747u /* "GWUF", little endian */
#define REPLY_VERSION 1u
#define STACK_BYTES (64 * 1024)
#define PAUSE_MS 50

/* The peer is our own software on the same machine: native byte order. */
struct reply {
    uint32_t magic;
    uint32_t version;
    int32_t pid;   /* whose memory the descriptor watches */
    int32_t error; /* errno of the failed attempt, 0 with a descriptor */
};

static int device_fd = -1;
static int listen_fd = -1;
static uid_t own_uid;

static int descriptor_from(const char *name)
{
    const char *text = getenv(name);
    char *end = NULL;
    long number;

    if (!text || !*text)
        return -1;
    errno = 0;
    number = strtol(text, &end, 10);
    if (errno || *end || number < 3 || number > INT_MAX)
        return -1;
    return fcntl((int)number, F_GETFD) < 0 ? -1 : (int)number;
}

static int peer_is_trusted(int peer)
{
    struct ucred credentials;
    socklen_t length = sizeof credentials;

    if (getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0)
        return 0;
    return credentials.uid == 0 || credentials.uid == own_uid;
}

static void send_reply(int peer, int uffd, int error)
{
    struct reply reply = {
        .magic = REPLY_MAGIC, .version = REPLY_VERSION, .pid = getpid(), .error = error};
    struct iovec part = {.iov_base = &reply, .iov_len = sizeof reply};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

    if (uffd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.space;
        message.msg_controllen = sizeof control.space;
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.header), &uffd, sizeof uffd);
    }
    /* A peer that does not read, or is gone, loses its turn. */
    (void)sendmsg(peer, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void serve(int peer)
{
    int uffd;

    if (!peer_is_trusted(peer))
        return;
    uffd = ioctl(device_fd, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
    send_reply(peer, uffd, uffd < 0 ? errno : 0);
    if (uffd >= 0)
        close(uffd);
}

static int is_final(int error)
{
    return error == EBADF || error == ENOTSOCK || error == EINVAL || error == EOPNOTSUPP;
}

static void *serve_for_ever(void *unused)
{
    (void)unused;
    (void)pthread_setname_np(pthread_self(), "godwit-handout");
    for (;;) {
        int peer = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);

        if (peer >= 0) {
            serve(peer);
            close(peer);
        } else if (is_final(errno)) {
            return NULL; /* the socket itself is gone: nothing will ever arrive */
        } else if (errno != EINTR && errno != ECONNABORTED) {
            /* Out of descriptors or memory: the connection stays queued, so wait. */
            (void)poll(NULL, 0, PAUSE_MS);
        }
    }
}

static int start_thread(const pthread_attr_t *attributes)
{
    pthread_t thread;

    return pthread_create(&thread, attributes, serve_for_ever, NULL);
}

/* The thread inherits a mask with everything blocked: signals are QEMU's business. */
static void start_server(void)
{
    pthread_attr_t attributes;
    sigset_t all, before;

    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before))
        return;
    if (!pthread_attr_init(&attributes)) {
        (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
        /* Thread-local storage of a large QEMU may not fit: then the default stack. */
        if (start_thread(&attributes)) {
            (void)pthread_attr_setstacksize(&attributes, 1024 * 1024);
            (void)start_thread(&attributes);
        }
        pthread_attr_destroy(&attributes);
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void keep_for_this_process(int fd)
{
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
}

__attribute__((constructor)) static void begin(void)
{
    int flags, library_fd;

    library_fd = descriptor_from("GODWIT_HANDOUT_LIBRARY_FD");
    device_fd = descriptor_from("GODWIT_UFFD_DEVICE_FD");
    listen_fd = descriptor_from("GODWIT_HANDOUT_LISTEN_FD");
    unsetenv("LD_PRELOAD");
    unsetenv("GODWIT_HANDOUT_LIBRARY_FD");
    unsetenv("GODWIT_UFFD_DEVICE_FD");
    unsetenv("GODWIT_HANDOUT_LISTEN_FD");
    /* This library is mapped by now: the descriptor it came through is of no more use. */
    if (library_fd >= 0)
        close(library_fd);
    if (device_fd < 0 || listen_fd < 0)
        return;
    keep_for_this_process(device_fd);
    keep_for_this_process(listen_fd);
    /* A non-blocking listener would turn the loop into a spin. */
    flags = fcntl(listen_fd, F_GETFL);
    if (flags >= 0)
        (void)fcntl(listen_fd, F_SETFL, flags & ~O_NONBLOCK);
    own_uid = geteuid();
    start_server();
}
