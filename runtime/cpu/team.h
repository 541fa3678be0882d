// A team of threads that goes through a list of steps together. A step is cut into shares, one for each member, and a share
// into pieces; a member that has finished its own share takes pieces of the others', so nobody waits for a member that the
// system has suspended, only for pieces begun. When all pieces of a step are finished, every member goes on to the next by
// itself: that costs the way of one cache line from one core to another. Between two lists members spin for a while before
// they sleep, because the next list mostly comes within microseconds.
#ifndef TEAM_H
#define TEAM_H

#include <pthread.h>
#include <stdatomic.h>
#include "kernels.h"

typedef struct Cpu Cpu;
typedef struct Team Team;
typedef struct Member Member;
typedef void Task(Member *self, const void *args, int begin, int end); // items begin..end-1

enum { ARGS = 224 }; // bytes

typedef struct {
    Task *task;
    int n;                    // items
    int64_t cost;             // of an item, in multiplications, about
    _Alignas(8) char args[ARGS];
} Step;

// What one member writes and another reads has a cache line of its own. Numbers of steps and pieces go on from list to list,
// and past the largest to zero.
struct Member {
    _Alignas(64) atomic_uint taken;    // pieces of its share so far: PIECES of each step
    _Alignas(64) atomic_uint finished; // pieces that it has finished so far, of all shares
    _Alignas(64) Team *team;
    pthread_t thread;
    unsigned step;                     // number of its present one
    Cpu *cpu;                          // what tasks work on; and what they have for this member alone:
    bool prepared;                     // x and blocks hold what the products of this step read
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

// Starts members 1..n_threads-1; with fewer when the system refuses, for the results are the same.
void llamac_team_start(Team *team, int n_threads);

// Runs the steps; alone, when they are small.
void llamac_team_run(Team *team);

// Asks the members to end, and waits for them.
void llamac_team_end(Team *team);

#endif
