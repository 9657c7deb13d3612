/*
 * init of a Linux guest that proves its memory: every thread owns pages, numbers them, steps them at random and looks
 * whether each still holds what was written last. One line a second: steps, and how often a page held something else.
 *
 * The kernel hands `rest_us=N` of its command line over: how long a thread rests after four steps, below 1000000.
 * Linked statically, with a thread for every processor. Build: gcc -O2 -static -pthread.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
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

int main(void)
{
    int console = open("/dev/console", O_RDWR);
    if (console >= 0)
        for (int descriptor = 0; descriptor < 3; descriptor++)
            dup2(console, descriptor);
    setvbuf(stdout, NULL, _IONBF, 0);
    const char *rest = getenv("rest_us");
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
    }
}
