// A QEMU plugin that counts the instructions of a program and prints their number to stderr when
// the program ends. No package has qemu-plugin.h, so the declarations that it needs are here.
//
// Usage: qemu-aarch64 -plugin ./instructions.so PROGRAM ...
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef uint64_t Id;
struct qemu_plugin_tb; // a block of instructions that run one after the other
void qemu_plugin_register_vcpu_tb_trans_cb(Id, void (*)(Id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, void (*)(unsigned, void *),
                                          int flags, void *);
void qemu_plugin_register_atexit_cb(Id, void (*)(Id, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);

int qemu_plugin_version = 1; // version of the plugin interface
static uint64_t count;

static void add(unsigned cpu, void *n) {
    (void)cpu, __atomic_add_fetch(&count, (uintptr_t)n, __ATOMIC_RELAXED);
}

static void translated(Id id, struct qemu_plugin_tb *block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_cb(block, add, 0, (void *)qemu_plugin_tb_n_insns(block));
}

static void ended(Id id, void *data) {
    (void)id, (void)data;
    fprintf(stderr, "instructions %llu\n", (unsigned long long)count);
}

int qemu_plugin_install(Id id, const void *info, int argc, char **argv) {
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
