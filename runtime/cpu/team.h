// A team of threads that goes through a list of steps together. A step is cut into shares, one for each member, and a share
// into pieces; who is through with its own takes what is left of the others', so nobody waits for a member that the system
// has put aside, only for pieces begun. When all pieces of a step are finished, every member goes on to the next by itself,
// without a word from the caller: that costs one cache line's way from one core to another. Between two lists members look for
// work for a while before they sleep, because the next one mostly comes within microseconds. cpu.c includes it.

typedef struct Cpu Cpu;
typedef struct Team Team;
typedef struct Member Member;
typedef void Task(Member *self, const void *args, int begin, int end); // items begin..end-1

enum {
    PIECES = 4,         // of a share
    ARGS = 224,         // bytes
    LATE = 16,          // looks whether a step is finished before its pieces are taken over from others: some 300 nanoseconds
    PATIENCE = 20000,   // looks for work before a member sleeps: some 200 microseconds
    LEAST_WORK = 20000, // multiplications in a step that are worth a team
};

typedef struct {
    Task *task;
    int n;                    // items
    int64_t cost;             // of an item, in multiplications, about
    _Alignas(8) char args[ARGS];
} Step;

// What one member writes and another looks at has a cache line of its own. Numbers of steps and pieces go on from list to list,
// and past the largest to zero.
struct Member {
    _Alignas(64) atomic_uint taken;    // pieces of its share so far: PIECES of each step
    _Alignas(64) atomic_uint finished; // pieces that it has finished so far, of all shares
    _Alignas(64) Team *team;
    pthread_t thread;
    unsigned step;                     // number of the one it is at
    Cpu *cpu;                          // what tasks work on; what they have for this member alone:
    bool prepared;                     // it has made for itself what the step works on: x or blocks
    float *x;                          // (cols,) for one token
    Block *blocks;                     // (cols / 32,)
    float *scratch;                    // (scratch_size,)
};

struct Team {
    Step *steps;
    int n_steps, n_threads;
    Member *members;      // (n_threads,); the first is the caller
    unsigned first;       // number of steps[0]
    atomic_uint goal;     // number behind the last step
    atomic_int sleepers;
    atomic_bool leaving;  // asks the members to end
    pthread_mutex_t lock; // guards falling asleep
    pthread_cond_t wake;
};

// Items begin..end-1 are share i of n.
static void share_of(int n, int n_threads, int i, int *begin, int *end) {
    *begin = (int)((int64_t)n * i / n_threads), *end = (int)((int64_t)n * (i + 1) / n_threads);
}

// Where a piece of items begin..end-1 begins. Each is three quarters of what is left, and the last all of it: so the last ones
// are small, and all members end at nearly the same time.
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
    for (int looks = 1; !is_finished(team, self->step); looks++) {
        PAUSE();
        for (int i = 1; looks == LATE && i < team->n_threads; i++) take_from(self, (me + i) % team->n_threads);
        if (looks % 1024 == 0) sched_yield();
    }
    self->step++;
}

static bool has_work(const Member *m) {
    return atomic_load(&m->team->goal) != m->step || atomic_load_explicit(&m->team->leaving, memory_order_relaxed);
}

static void *member(void *arg) {
    Member *self = arg;
    Team *team = self->team;
    for (int looks = 0; !atomic_load_explicit(&team->leaving, memory_order_acquire); looks++) {
        while (self->step != atomic_load_explicit(&team->goal, memory_order_acquire)) take_step(self), looks = 0;
        PAUSE();
        if (looks % 1024 == 1023) sched_yield();
        if (looks < PATIENCE) continue;
        pthread_mutex_lock(&team->lock);
        atomic_fetch_add(&team->sleepers, 1);
        while (!has_work(self)) pthread_cond_wait(&team->wake, &team->lock);
        atomic_fetch_sub(&team->sleepers, 1);
        pthread_mutex_unlock(&team->lock);
        looks = 0;
    }
    return NULL;
}

static void wake(Team *team) {
    if (!atomic_load(&team->sleepers)) return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

// Runs the steps; alone, when they are small.
static void run_steps(Team *team) {
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

// Starts members 1..n_threads-1; with fewer when the system refuses, for the results are the same.
static void start_team(Team *team, int n_threads) {
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->wake, NULL);
    int started = 1;
    while (started < n_threads && !pthread_create(&team->members[started].thread, NULL, member, &team->members[started])) started++;
    team->n_threads = started;
}

// Asks the members to end, and waits for them.
static void end_team(Team *team) {
    atomic_store(&team->leaving, true);
    wake(team);
    for (int i = 1; i < team->n_threads; i++) pthread_join(team->members[i].thread, NULL);
}
