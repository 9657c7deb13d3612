/*
 * init of a Linux guest that proves its memory: every thread owns pages, numbers them, steps them at random and looks
 * whether each still holds what was written last. One line a second: steps, and how often a page held something else.
 *
 * The power key ends it in order; the modules that bring it are listed in /modules/order.
 *
 * The kernel hands over from its command line: `rest_us=N`, how long a thread rests after four steps, below 1000000;
 * `reboot_at=N`, the guest reboots by itself after that many steps. Linked statically, with a thread for every processor.
 * Build: gcc -O2 -static -pthread.
 */
#include <fcntl.h>
#include <linux/input.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define WORDS (PAGE / sizeof(uint64_t))
/* Pages of a thread: 24 MiB. */
#define PAGES 6144
#define THREADS_MAX 16

static atomic_ulong steps, wrong;
static long rest_us = 200;

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* The last word of a page is its number, so that a page in another's place shows, too. */
static void *check(void *argument)
{
    uint64_t thread = (uintptr_t)argument, state = 88172645463325252ull + thread;
    uint64_t *memory = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint32_t *last = calloc(PAGES, sizeof *last);
    if (memory == MAP_FAILED || last == NULL) {
        printf("checker: no memory\n");
        return NULL;
    }
    for (uint64_t page = 0; page < PAGES; page++) {
        memory[page * WORDS] = 0;
        memory[page * WORDS + WORDS - 1] = thread << 32 | page;
    }
    for (;;) {
        for (int turn = 0; turn < 4; turn++) {
            uint64_t page = (next(&state) >> 20) % PAGES;
            volatile uint64_t *at = memory + page * WORDS;
            if (at[0] != last[page] || at[WORDS - 1] != (thread << 32 | page))
                atomic_fetch_add(&wrong, 1);
            at[0] = ++last[page];
        }
        atomic_fetch_add(&steps, 4);
        struct timespec rest = {0, rest_us * 1000};
        nanosleep(&rest, NULL);
    }
}

static void load_modules(void)
{
    char name[128], path[256];
    FILE *order = fopen("/modules/order", "r");
    while (order != NULL && fgets(name, sizeof name, order) != NULL) {
        name[strcspn(name, "\n")] = 0;
        snprintf(path, sizeof path, "/modules/%s", name);
        int module = open(path, O_RDONLY | O_CLOEXEC);
        if (module < 0 || syscall(SYS_finit_module, module, "", 0) != 0)
            printf("checker: %s did not load\n", name);
        if (module >= 0)
            close(module);
    }
    if (order != NULL)
        fclose(order);
}

/* Which of the devices the power key is at depends on the machine: all are listened to. */
static void *await_power_key(void *unused)
{
    struct pollfd devices[8];
    int count = 0;
    for (int number = 0; number < 8; number++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/input/event%d", number);
        int device = open(path, O_RDONLY);
        if (device >= 0)
            devices[count++] = (struct pollfd){.fd = device, .events = POLLIN};
    }
    while (count > 0 && poll(devices, count, -1) > 0)
        for (int each = 0; each < count; each++) {
            struct input_event event;
            if ((devices[each].revents & POLLIN) != 0 && read(devices[each].fd, &event, sizeof event) == sizeof event
                && event.type == EV_KEY && event.code == KEY_POWER && event.value == 1) {
                printf("checker: the power key was pressed\n");
                reboot(RB_POWER_OFF);
            }
        }
    return unused;
}

int main(void)
{
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    int console = open("/dev/console", O_RDWR);
    if (console >= 0)
        for (int descriptor = 0; descriptor < 3; descriptor++)
            dup2(console, descriptor);
    setvbuf(stdout, NULL, _IONBF, 0);
    load_modules();
    pthread_t listener;
    pthread_create(&listener, NULL, await_power_key, NULL);
    const char *rest = getenv("rest_us"), *reboot_at = getenv("reboot_at");
    if (rest != NULL && atol(rest) > 0 && atol(rest) < 1000000)
        rest_us = atol(rest);
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    for (long thread = 0; thread < processors && thread < THREADS_MAX; thread++) {
        pthread_t one;
        if (pthread_create(&one, NULL, check, (void *)(uintptr_t)thread) != 0)
            printf("checker: no thread\n");
    }
    for (;;) {
        sleep(1);
        printf("checker: steps %lu wrong %lu on %ld processors\n", atomic_load(&steps), atomic_load(&wrong), processors);
        if (reboot_at != NULL && atomic_load(&steps) >= strtoul(reboot_at, NULL, 10)) {
            printf("checker: reboots by itself\n");
            reboot(RB_AUTOBOOT);
        }
    }
}
