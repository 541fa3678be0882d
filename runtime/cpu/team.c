#define _DEFAULT_SOURCE // POSIX beside C11
#include <sched.h>
#include "team.h"

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() (void)0
#endif

enum {
    PIECES = 4,         // of a share
    LATE = 16,          // spins before a member takes pieces of the others: some 300 nanoseconds
    PATIENCE = 20000,   // spins before a member sleeps: some 200 microseconds
    LEAST_WORK = 20000, // multiplications in a step that are worth a team
};

// Items begin..end-1 are share i of n.
static void share_of(int n, int n_threads, int i, int *begin, int *end) {
    *begin = (int)((int64_t)n * i / n_threads), *end = (int)((int64_t)n * (i + 1) / n_threads);
}

// Where a piece of items begin..end-1 begins. Each is three quarters of what is left, and the last all of it: so the last
// ones are small, and all members end at nearly the same time.
static int piece_at(int begin, int end, int piece) { return piece < PIECES ? end - ((end - begin) >> 2 * piece) : end; }

// Takes pieces of share i of the present step while there are any. Once one is taken, the list stays as it is until that
// piece is finished.
static void take_from(Member *self, int i) {
    Team *team = self->team;
    atomic_uint *taken = &team->members[i].taken;
    unsigned piece = atomic_load(taken), last = (self->step + 1) * PIECES, done = 0;
    while ((int)(last - piece) > 0) {
        if (!atomic_compare_exchange_weak(taken, &piece, piece + 1)) continue;
        const Step *step = &team->steps[self->step - team->first];
        int begin, end, first, next;
        share_of(step->n, team->n_threads, i, &begin, &end);
        first = piece_at(begin, end, piece % PIECES), next = piece_at(begin, end, piece % PIECES + 1);
        if (first < next) step->task(self, step->args, first, next);
        piece++, done++;
    }
    unsigned finished = atomic_load_explicit(&self->finished, memory_order_relaxed); // which nobody else changes
    if (done) atomic_store_explicit(&self->finished, finished + done, memory_order_release);
}

static bool is_finished(Team *team, unsigned step) {
    unsigned finished = 0;
    for (int i = 0; i < team->n_threads; i++) finished += atomic_load_explicit(&team->members[i].finished, memory_order_acquire);
    return (int)(finished - (step + 1) * PIECES * team->n_threads) >= 0;
}

// Its own share, and others' when they are late: asking them sooner would only disturb them.
static void take_step(Member *self) {
    Team *team = self->team;
    int me = (int)(self - team->members);
    self->prepared = false;
    take_from(self, me);
    for (int spins = 1; !is_finished(team, self->step); spins++) {
        PAUSE();
        for (int i = 1; spins == LATE && i < team->n_threads; i++) take_from(self, (me + i) % team->n_threads);
        if (spins % 1024 == 0) sched_yield();
    }
    self->step++;
}

// In one order with `sleepers`: who goes to sleep sees that there is work, or who has it sees the sleeper.
static bool has_work(const Member *m) { return atomic_load(&m->team->goal) != m->step || atomic_load(&m->team->leaving); }

static void *member(void *arg) {
    Member *self = arg;
    Team *team = self->team;
    for (int spins = 0; !atomic_load_explicit(&team->leaving, memory_order_acquire); spins++) {
        while (self->step != atomic_load_explicit(&team->goal, memory_order_acquire)) take_step(self), spins = 0;
        PAUSE();
        if (spins % 1024 == 1023) sched_yield();
        if (spins < PATIENCE) continue;
        pthread_mutex_lock(&team->lock);
        atomic_fetch_add(&team->sleepers, 1);
        while (!has_work(self)) pthread_cond_wait(&team->wake, &team->lock);
        atomic_fetch_sub(&team->sleepers, 1);
        pthread_mutex_unlock(&team->lock);
        spins = 0;
    }
    return NULL;
}

static void wake(Team *team) {
    if (!atomic_load(&team->sleepers)) return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

void llamac_team_run(Team *team) {
    Member *self = team->members;
    int64_t work = 0;
    for (int i = 0; i < team->n_steps; i++) work += team->steps[i].n * team->steps[i].cost;
    if (team->n_threads == 1 || work < (int64_t)LEAST_WORK * team->n_steps) {
        for (const Step *step = team->steps; step < team->steps + team->n_steps; step++) {
            self->prepared = false;
            step->task(self, step->args, 0, step->n);
        }
        return;
    }
    team->first = self->step;
    atomic_store(&team->goal, self->step + team->n_steps);
    wake(team);
    for (int i = 0; i < team->n_steps; i++) take_step(self);
}

void llamac_team_start(Team *team, int n_threads) {
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->wake, NULL);
    Member *m = team->members + 1;
    while (m < team->members + n_threads && !pthread_create(&m->thread, NULL, member, m)) m++;
    team->n_threads = (int)(m - team->members);
}

void llamac_team_end(Team *team) {
    atomic_store(&team->leaving, true);
    wake(team);
    for (int i = 1; i < team->n_threads; i++) pthread_join(team->members[i].thread, NULL);
    if (!team->n_threads) return; // never started
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->lock);
}
