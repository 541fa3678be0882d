// The interface to the operating system: a part each for WebAssembly, Windows and POSIX (with code
// for Linux or macOS alone), and a part for Windows and POSIX. All other files need only C11.
#define _GNU_SOURCE 1        // POSIX in addition to C11, and sched_getaffinity
#define _FILE_OFFSET_BITS 64 // files above 2 GB on 32-bit systems
#ifndef _WIN32_WINNT
#define _WIN32_WINNT 0x0602 // Windows 8, for its locks and its functions for paths
#endif
#define WIN32_LEAN_AND_MEAN 1 // without definitions that conflict with common names
#define NOMINMAX 1
#include <errno.h>
#include "backend.h" // refuses -ffast-math
#include "bytes.h"

#ifdef __wasm__
// ----------------------------------------------------------------------------
// WebAssembly, as in a browser: a module has memory and one thread, but no files and no clock

static const char no_files[] = "WebAssembly has no files: open the model from memory";

bool llamac_map_file(const char *path, File *mapped, Error *e) {
    (void)path, (void)mapped;
    return fail(e, no_files);
}

void llamac_unmap(File *file) { *file = (File){0}; }

bool llamac_read_mapped(const File *file, uint8_t *bytes, size_t at, size_t n) {
    (void)file, (void)bytes, (void)at, (void)n;
    return false;
}

uint8_t *llamac_read_file(const char *path, const void *magic, size_t n, size_t *size, Error *e) {
    (void)path, (void)magic, (void)n, (void)size;
    return fail(e, no_files), NULL;
}

bool llamac_create_file(NewFile *file, const char *path, const void *magic, size_t n, Error *e) {
    (void)file, (void)path, (void)magic, (void)n;
    return fail(e, no_files);
}

bool llamac_finish_file(NewFile *file, bool ok, Error *e) {
    (void)file, (void)ok;
    return fail(e, no_files);
}

void *llamac_allocate_aligned(size_t alignment, size_t n) { return aligned_alloc(alignment, n); }
void llamac_free_aligned(void *p) { free(p); }
void llamac_use_large_pages(const void *p, size_t n) { (void)p, (void)n; }
void llamac_drop_pages(const uint8_t *begin, const uint8_t *end) { (void)begin, (void)end; }

// Returns how much the memory can grow: to 65536 pages of 64 KiB.
uint64_t llamac_free_memory(const char *root) {
    (void)root;
    return (uint64_t)(65536 - __builtin_wasm_memory_size(0)) << 16;
}

int llamac_default_threads(void) { return 1; }
double llamac_seconds(void) { return 0; }

bool llamac_start_thread(Thread *t, void (*run)(void *), void *arg) {
    (void)t, (void)run, (void)arg;
    return false;
}

void llamac_join_thread(Thread *t) { (void)t; }
void llamac_yield(void) {}
void llamac_open_monitor(Monitor *m) { (void)m; }
void llamac_close_monitor(Monitor *m) { (void)m; }
void llamac_lock(Monitor *m) { (void)m; }
void llamac_unlock(Monitor *m) { (void)m; }
void llamac_sleep(Monitor *m) { (void)m; }
void llamac_wake_all(Monitor *m) { (void)m; }

#else
static const char file_cut_off[] = "run: model: its file was cut off while in use\n";

// What is at a path.
typedef enum { NOTHING, REGULAR_FILE, LINK, FOLDER, SOMETHING_ELSE, CANNOT_TELL } Kind;

#ifdef _WIN32
// ----------------------------------------------------------------------------
// Windows
//
// The functions of the C library whose names begin with _w take paths in UTF-16 and set errno.
// System functions are used where the C library has no suitable one.

#include <fcntl.h>
#include <io.h>
#include <process.h>
#include <share.h>
#include <sys/stat.h>
#include <windows.h>
#include <psapi.h>
#include <shellapi.h>

// Sets errno from the latest error of a system function.
static void set_errno(void) {
    switch (GetLastError()) {
    case ERROR_FILE_NOT_FOUND:
    case ERROR_PATH_NOT_FOUND: errno = ENOENT; break;
    case ERROR_ACCESS_DENIED:
    case ERROR_SHARING_VIOLATION: errno = EACCES; break;
    case ERROR_COMMITMENT_LIMIT:
    case ERROR_NOT_ENOUGH_MEMORY: errno = ENOMEM; break;
    case ERROR_DISK_FULL: errno = ENOSPC; break;
    default: errno = EIO;
    }
}

// Returns a text in UTF-16, to be freed. Returns NULL and sets errno if it is not UTF-8, or if
// there is not enough memory.
static wchar_t *to_wide(const char *text) {
    int n = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, NULL, 0);
    wchar_t *wide = n ? resize(NULL, n, sizeof *wide) : NULL;
    errno = n ? ENOMEM : ENOENT;
    if (wide) MultiByteToWideChar(CP_UTF8, 0, text, -1, wide, n);
    return wide;
}

// Returns a text in UTF-8, to be freed. Returns NULL and sets errno if there is not enough memory.
static char *to_utf8(const wchar_t *wide) {
    int n = WideCharToMultiByte(CP_UTF8, 0, wide, -1, NULL, 0, NULL, NULL);
    char *text = resize(NULL, n, 1);
    errno = ENOMEM;
    if (text) WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, n, NULL, NULL);
    return text;
}

// Returns what is at a path, following links or not.
static Kind kind_at(const char *path, bool follow) {
    wchar_t *wide = to_wide(path);
    if (!wide) return errno == ENOENT ? NOTHING : CANNOT_TELL;
    DWORD is = GetFileAttributesW(wide);
    set_errno();
    free(wide);
    if (is == INVALID_FILE_ATTRIBUTES) return errno == ENOENT ? NOTHING : CANNOT_TELL;
    if (!follow && (is & FILE_ATTRIBUTE_REPARSE_POINT)) return LINK;
    if (is & FILE_ATTRIBUTE_DIRECTORY) return FOLDER;
    return is & FILE_ATTRIBUTE_DEVICE ? SOMETHING_ELSE : REGULAR_FILE;
}

// Returns the path at the end of a link, to be freed. Returns NULL and sets errno if that fails.
static char *end_of_link(const char *path) {
    wchar_t *wide = to_wide(path), *end = NULL;
    char *text = NULL;
    if (!wide) return NULL;
    HANDLE file = CreateFileW(wide, 0, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL,
                              OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, NULL);
    set_errno();
    free(wide);
    if (file == INVALID_HANDLE_VALUE) return NULL;
    DWORD n = GetFinalPathNameByHandleW(file, NULL, 0, 0); // with the zero at its end
    set_errno();
    if (n && (end = resize(NULL, n, sizeof *end)) && GetFinalPathNameByHandleW(file, end, n, 0))
        text = to_utf8(end);
    free(end);
    CloseHandle(file);
    return text;
}

static FILE *open_stream(const char *path) {
    wchar_t *wide = to_wide(path);
    FILE *file = wide ? _wfopen(wide, L"rb") : NULL;
    free(wide);
    return file;
}

// Opens a file for reading. Returns its descriptor, or -1 with errno set.
static int open_descriptor(const char *path) {
    if (kind_at(path, true) == FOLDER) return errno = EISDIR, -1;
    wchar_t *wide = to_wide(path);
    int file = wide ? _wopen(wide, _O_RDONLY | _O_BINARY | _O_NOINHERIT) : -1;
    free(wide);
    return file;
}

static void close_descriptor(int file) { _close(file); }

static Kind kind_of(int file, uint64_t *size) {
    struct _stat64 info;
    if (_fstat64(file, &info)) return CANNOT_TELL;
    *size = (uint64_t)info.st_size;
    return (info.st_mode & _S_IFMT) == _S_IFREG ? REGULAR_FILE : SOMETHING_ELSE;
}

// Reads up to n bytes at an offset. Returns their number, 0 at the end of the file, -1 after an
// error.
static int64_t read_at(int file, uint8_t *bytes, size_t n, size_t at) {
    if (_lseeki64(file, (int64_t)at, SEEK_SET) < 0) return -1;
    return _read(file, bytes, n < 1 << 30 ? (unsigned)n : 1 << 30);
}

// Maps a file for reading. Returns NULL and sets errno if that fails.
static void *map_descriptor(int file, size_t size) {
    HANDLE mapping =
        CreateFileMappingW((HANDLE)_get_osfhandle(file), NULL, PAGE_READONLY, 0, 0, NULL);
    void *bytes = mapping ? MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, size) : NULL;
    set_errno();
    if (mapping) CloseHandle(mapping); // the view keeps it
    return bytes;
}

static void unmap(void *bytes, size_t size) {
    (void)size;
    UnmapViewOfFile(bytes);
}

// Creates a file. Replaces XXXXXX at the end of its name to make the name unique. Returns NULL and
// sets errno if that fails. Who may read the file depends on the folder.
static FILE *create_unique(char *name) {
    char *end = name + strlen(name) - 6;
    int file = -1;
    errno = EEXIST;
    for (unsigned i = 0; file < 0 && errno == EEXIST && i < 100; i++) {
        snprintf(end, 7, "%06lx", (GetTickCount() * 31 + GetCurrentProcessId() + i) & 0xffffff);
        wchar_t *wide = to_wide(name);
        if (!wide) return NULL;
        file = _wopen(wide, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY, _S_IREAD | _S_IWRITE);
        free(wide);
    }
    FILE *stream = file < 0 ? NULL : _fdopen(file, "wb");
    if (!stream && file >= 0) _close(file);
    return stream;
}

static void remove_file(const char *name) {
    wchar_t *wide = to_wide(name);
    if (wide) _wunlink(wide);
    free(wide);
}

// Waits until all of a file is on the disk.
static bool sync_file(FILE *stream) { return !_commit(_fileno(stream)); }

// Moves a file, replacing any file that is there.
static bool move_file(const char *from, const char *to) {
    wchar_t *wide_from = to_wide(from), *wide_to = to_wide(to);
    bool moved =
        wide_from && wide_to
        && MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH);
    if (wide_from && wide_to) set_errno();
    free(wide_from);
    free(wide_to);
    return moved;
}

void *llamac_allocate_aligned(size_t alignment, size_t n) { return _aligned_malloc(n, alignment); }

void llamac_free_aligned(void *p) { _aligned_free(p); }

// Large pages need a privilege that users do not have.
void llamac_use_large_pages(const void *p, size_t n) { (void)p, (void)n; }

// Unlocking pages that are not locked removes them from the memory of the process.
static void drop_whole_pages(void *p, size_t n) { VirtualUnlock(p, n); }

static size_t page_size(void) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

uint64_t llamac_free_memory(const char *root) {
    MEMORYSTATUSEX memory = {.dwLength = sizeof memory};
    (void)root;
    if (!GlobalMemoryStatusEx(&memory)) return UINT64_MAX;
    return memory.ullAvailPhys < memory.ullAvailPageFile ? memory.ullAvailPhys
                                                         : memory.ullAvailPageFile;
}

double llamac_seconds(void) {
    LARGE_INTEGER now, per_second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&per_second);
    return (double)now.QuadPart / (double)per_second.QuadPart;
}

// Returns how many physical cores the process may use, in its group of up to 64 processors.
static long usable_cores(void) {
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION cores[1024];
    DWORD_PTR allowed, all;
    DWORD size = sizeof cores;
    long n = 0;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &allowed, &all)
        || !GetLogicalProcessorInformation(cores, &size)) {
        SYSTEM_INFO info;
        GetSystemInfo(&info);
        return (long)info.dwNumberOfProcessors;
    }
    for (DWORD i = 0; i < size / sizeof *cores; i++)
        n += cores[i].Relationship == RelationProcessorCore && (cores[i].ProcessorMask & allowed);
    return n;
}

// Numbers of <winnt.h> that older headers lack.
bool llamac_has_dotprod(void) {
    enum { ARM_V82_DOT_PRODUCT = 43 };
    return IsProcessorFeaturePresent(ARM_V82_DOT_PRODUCT);
}

bool llamac_has_i8mm(void) {
    enum { ARM_V82_I8MM = 66 };
    return IsProcessorFeaturePresent(ARM_V82_I8MM);
}

static unsigned __stdcall run_thread(void *thread) {
    Thread *t = thread;
    t->run(t->arg);
    return 0;
}

bool llamac_start_thread(Thread *t, void (*run)(void *), void *arg) {
    t->run = run, t->arg = arg;
    t->handle = (void *)_beginthreadex(NULL, 0, run_thread, t, 0, NULL);
    return t->handle;
}

void llamac_join_thread(Thread *t) {
    WaitForSingleObject(t->handle, INFINITE);
    CloseHandle(t->handle);
}

void llamac_yield(void) { SwitchToThread(); }

_Static_assert(sizeof(SRWLOCK) == sizeof(void *) && sizeof(CONDITION_VARIABLE) == sizeof(void *),
               "a Monitor has room for both");

void llamac_open_monitor(Monitor *m) { *m = (Monitor){0}; }
void llamac_close_monitor(Monitor *m) { (void)m; }
void llamac_lock(Monitor *m) { AcquireSRWLockExclusive((SRWLOCK *)&m->lock); }
void llamac_unlock(Monitor *m) { ReleaseSRWLockExclusive((SRWLOCK *)&m->lock); }
void llamac_wake_all(Monitor *m) { WakeAllConditionVariable((CONDITION_VARIABLE *)&m->wake); }

void llamac_sleep(Monitor *m) {
    SleepConditionVariableSRW((CONDITION_VARIABLE *)&m->wake, (SRWLOCK *)&m->lock, INFINITE, 0);
}

bool llamac_stderr_is_terminal(void) {
    DWORD mode;
    return GetConsoleMode(GetStdHandle(STD_ERROR_HANDLE), &mode);
}

uint64_t llamac_peak_memory(void) {
    PROCESS_MEMORY_COUNTERS used;
    K32GetProcessMemoryInfo(GetCurrentProcess(), &used, sizeof used);
    return used.PeakWorkingSetSize;
}

// This happens if the file is on another machine, or on a disk that was removed: Windows prevents
// other programs from truncating a mapped file.
static LONG WINAPI end_by_exception(EXCEPTION_POINTERS *exception) {
    DWORD written;
    if (exception->ExceptionRecord->ExceptionCode != EXCEPTION_IN_PAGE_ERROR)
        return EXCEPTION_CONTINUE_SEARCH;
    WriteFile(GetStdHandle(STD_ERROR_HANDLE), file_cut_off, sizeof file_cut_off - 1, &written,
              NULL);
    ExitProcess(1);
}

static UINT code_page_before; // of the console's output

static void restore_code_page(void) { SetConsoleOutputCP(code_page_before); }

static BOOL WINAPI restore_before_end(DWORD event) {
    (void)event;
    restore_code_page();
    return FALSE; // the program ends
}

void llamac_begin_program(int *argc, char ***argv) {
    for (int stream = 0; stream < 3; stream++) _setmode(stream, _O_BINARY);
    // A console decodes each write separately, so a character must not be split between two. The
    // program flushes stdout itself
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    SetUnhandledExceptionFilter(end_by_exception);
    code_page_before = GetConsoleOutputCP();
    if (code_page_before) {
        SetConsoleOutputCP(CP_UTF8);
        SetConsoleCtrlHandler(restore_before_end, TRUE);
        atexit(restore_code_page);
    }
    int n;
    wchar_t **wide = CommandLineToArgvW(GetCommandLineW(), &n);
    char **texts = wide ? resize(NULL, n, sizeof *texts) : NULL;
    for (int i = 0; texts && i < n; i++)
        if (!(texts[i] = to_utf8(wide[i]))) return;
    if (texts) texts[n] = NULL, *argc = n, *argv = texts;
}

// Reads a line of the console, up to n >= 4096 bytes.
static int64_t read_console(HANDLE console, char *bytes, size_t n) {
    enum { MAX = 1024 };
    wchar_t text[MAX + 1];
    DWORD got = 0, more = 0, kept = 0;
    do {
        SetLastError(0);
        if (!ReadConsoleW(console, text, MAX, &got, NULL)) return set_errno(), -1;
    } while (!got && GetLastError() == ERROR_OPERATION_ABORTED); // Ctrl-C: the program ends now
    if (!got || text[0] == 26) return 0; // Ctrl-Z
    if (IS_HIGH_SURROGATE(text[got - 1]) && ReadConsoleW(console, text + got, 1, &more, NULL))
        got += more;
    for (DWORD i = 0; i < got; i++)
        if (text[i] != '\r') text[kept++] = text[i];
    return WideCharToMultiByte(CP_UTF8, 0, text, (int)kept, bytes, (int)n, NULL, NULL);
}

// Replaces \r\n by \n. Returns how many of the n bytes remain.
static int64_t end_lines(char *bytes, DWORD n) {
    DWORD kept = 0;
    for (DWORD i = 0; i < n; i++)
        if (bytes[i] != '\r' || i + 1 == n || bytes[i + 1] != '\n') bytes[kept++] = bytes[i];
    return kept;
}

int64_t llamac_read_input(char *bytes, size_t n, bool wait) {
    HANDLE input = GetStdHandle(STD_INPUT_HANDLE);
    DWORD mode, got = 0, ready = 0;
    if (GetConsoleMode(input, &mode))
        return wait ? read_console(input, bytes, n) : LLAMAC_INPUT_LATER;
    bool is_empty = !wait && GetFileType(input) == FILE_TYPE_PIPE
                    && PeekNamedPipe(input, NULL, 0, NULL, &ready, NULL) && !ready;
    if (is_empty) return LLAMAC_INPUT_LATER;
    if (ReadFile(input, bytes, n < 1 << 30 ? (DWORD)n - 1 : 1 << 30, &got, NULL)) {
        DWORD more = 0;
        if (got && bytes[got - 1] == '\r') ReadFile(input, bytes + got, 1, &more, NULL);
        return end_lines(bytes, got + more);
    }
    if (GetLastError() == ERROR_BROKEN_PIPE) return 0; // the writer has closed it
    return set_errno(), -1;
}

#else
// ----------------------------------------------------------------------------
// POSIX

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

static Kind kind_of_mode(mode_t mode) {
    return S_ISREG(mode)   ? REGULAR_FILE
           : S_ISLNK(mode) ? LINK
           : S_ISDIR(mode) ? FOLDER
                           : SOMETHING_ELSE;
}

// Returns what is at a path, following links or not.
static Kind kind_at(const char *path, bool follow) {
    struct stat info;
    if (follow ? stat(path, &info) : lstat(path, &info))
        return errno == ENOENT ? NOTHING : CANNOT_TELL;
    return kind_of_mode(info.st_mode);
}

// Returns the path at the end of a link, to be freed. Returns NULL and sets errno if that fails.
static char *end_of_link(const char *path) { return realpath(path, NULL); }

static FILE *open_stream(const char *path) { return fopen(path, "rb"); }

// Opens a file for reading. Returns its descriptor, or -1 with errno set. A pipe is opened without
// waiting for its writer, so that it can be refused.
static int open_descriptor(const char *path) {
    return open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
}

static void close_descriptor(int file) { close(file); }

static Kind kind_of(int file, uint64_t *size) {
    struct stat info;
    if (fstat(file, &info)) return CANNOT_TELL;
    *size = (uint64_t)info.st_size;
    return kind_of_mode(info.st_mode);
}

// Reads up to n bytes at an offset. Returns their number, 0 at the end of the file, -1 after an
// error.
static int64_t read_at(int file, uint8_t *bytes, size_t n, size_t at) {
    return pread(file, bytes, n, (off_t)at);
}

// Maps a file for reading. Returns NULL and sets errno if that fails.
static void *map_descriptor(int file, size_t size) {
    void *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0);
    return bytes == MAP_FAILED ? NULL : bytes;
}

static void unmap(void *bytes, size_t size) { munmap(bytes, size); }

// Creates a file, readable only by its owner. Replaces XXXXXX at the end of its name to make the
// name unique. Returns NULL and sets errno if that fails.
static FILE *create_unique(char *name) {
    int file = mkstemp(name);
    FILE *stream = file < 0 ? NULL : fdopen(file, "wb");
    if (!stream && file >= 0) close(file), unlink(name);
    return stream;
}

static void remove_file(const char *name) { unlink(name); }

// Waits until all of a file is on the disk.
static bool sync_file(FILE *stream) { return !fsync(fileno(stream)); }

// Moves a file, replacing any file that is there.
static bool move_file(const char *from, const char *to) { return !rename(from, to); }

void *llamac_allocate_aligned(size_t alignment, size_t n) { return aligned_alloc(alignment, n); }

void llamac_free_aligned(void *p) { free(p); }

void llamac_use_large_pages(const void *p, size_t n) {
#ifdef MADV_HUGEPAGE // Linux
    madvise((void *)p, n, MADV_HUGEPAGE);
#else
    (void)p, (void)n;
#endif
}

static void drop_whole_pages(void *p, size_t n) { madvise(p, n, MADV_DONTNEED); }

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

// Linux reports free memory in files. On other systems, all memory of the machine counts as free.

enum { MAX_SYSTEM_PATH = 4096 }; // bytes, as in Linux, with the terminating zero

// Returns the number in the file folder/name that follows `word` at the beginning of a line, or, if
// word is NULL, the number at the beginning of the file. Returns `otherwise` without such a number:
// the text of a limit may be "max".
static uint64_t number_in(const char *folder, const char *name, const char *word,
                          uint64_t otherwise) {
    char path[MAX_SYSTEM_PATH + 64], line[256];
    unsigned long long number = otherwise;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    for (size_t n = word ? strlen(word) : 0; file && fgets(line, sizeof line, file);)
        if (!word || !strncmp(line, word, n)) {
            sscanf(line + n, "%llu", &number);
            break;
        }
    if (file) fclose(file);
    return number;
}

// Returns how many bytes a control group (version 1 or 2) leaves below its limit. Cached pages of
// files do not count as used, because the system drops them when it needs memory.
static uint64_t left_by_group(const char *folder, bool v2) {
    const char *limit_name = v2 ? "memory.max" : "memory.limit_in_bytes";
    uint64_t limit = number_in(folder, limit_name, NULL, UINT64_MAX);
    // the kernel slows down processes that exceed the soft limit
    uint64_t soft = v2 ? number_in(folder, "memory.high", NULL, UINT64_MAX) : limit;
    uint64_t used = number_in(folder, v2 ? "memory.current" : "memory.usage_in_bytes", NULL, 0);
    const char *inactive = v2 ? "inactive_file " : "total_inactive_file ";
    const char *active = v2 ? "active_file " : "total_active_file ";
    uint64_t files =
        number_in(folder, "memory.stat", inactive, 0) + number_in(folder, "memory.stat", active, 0);
    limit = soft < limit ? soft : limit;
    used -= files < used ? files : used;
    return limit > used ? limit - used : 0;
}

// Returns the least of the bytes that a control group and its ancestors leave. `line` is a line of
// /proc/self/cgroup, "number:controllers:path"; version 2 has no controllers.
static uint64_t left_by_groups(const char *root, const char *line) {
    char folder[MAX_SYSTEM_PATH + 64];
    const char *controllers = strchr(line, ':');
    const char *path = controllers ? strchr(controllers + 1, ':') : NULL;
    uint64_t min = UINT64_MAX;
    bool v2 = path && path == controllers + 1;
    if (!path || (!v2 && strncmp(controllers, ":memory:", 8))) return min;
    const char *mount = v2 ? "" : "/memory";
    size_t top = (size_t)snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s", root, mount);
    snprintf(folder + top, sizeof folder - top, "%.*s", (int)strcspn(path + 1, "\n"), path + 1);
    // Cut off one name at a time, from the group up to the root. In a container, the path may be
    // the one outside it: a folder that does not exist sets no limit.
    for (char *end = folder + strlen(folder);; end = strrchr(folder, '/')) {
        *end = 0;
        uint64_t left = left_by_group(folder, v2);
        min = left < min ? left : min;
        if (strlen(folder) <= top) return min;
    }
}

uint64_t llamac_free_memory(const char *root) {
    char path[MAX_SYSTEM_PATH], line[MAX_SYSTEM_PATH];
    uint64_t whole = (uint64_t)sysconf(_SC_PHYS_PAGES) * page_size();
    snprintf(path, sizeof path, "%s/proc", root);
    uint64_t min = number_in(path, "meminfo", "MemAvailable:", whole / 1024);
    min = min < whole / 1024 ? 1024 * min : whole; // meminfo counts KiB
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        uint64_t left = left_by_groups(root, line);
        min = left < min ? left : min;
    }
    if (file) fclose(file);
    return min;
}

double llamac_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

#ifdef __linux__
// Returns whether a logical processor shares its core with an allowed processor of a lower number.
static bool shares_core(int processor, const cpu_set_t *allowed) {
    char path[80];
    int first, last, n;
    bool shares = false;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
             processor);
    FILE *file = fopen(path, "r"); // its text is a list such as 0-1 or 0,64
    while (file && (n = fscanf(file, "%d-%d", &first, &last)) > 0) {
        for (int i = first; i <= (n == 2 ? last : first) && i < processor; i++)
            shares |= CPU_ISSET(i, allowed) != 0;
        if (getc(file) != ',') break;
    }
    if (file) fclose(file);
    return shares;
}

// Returns how many physical cores the process may use. A second thread on a core (SMT) would only
// wait for the same arithmetic units.
static long affine_cores(void) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return sysconf(_SC_NPROCESSORS_ONLN);
    long cores = CPU_COUNT(&allowed);
    FILE *file = fopen("/sys/devices/system/cpu/smt/active", "r");
    bool smt = file && getc(file) == '1';
    if (file) fclose(file);
    for (int i = 0; smt && i < CPU_SETSIZE; i++)
        cores -= CPU_ISSET(i, &allowed) && shares_core(i, &allowed);
    return cores;
}
#else
static long affine_cores(void) { return sysconf(_SC_NPROCESSORS_ONLN); }
#endif

// A container's CPU quota (microseconds of each period) may allow fewer cores than it sees.
static long usable_cores(void) {
    long cores = affine_cores(), quota = 0, period = 0;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    bool limited = file && fscanf(file, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0;
    if (limited && quota / period < cores) cores = quota / period;
    if (file) fclose(file);
    return cores;
}

#if defined(__linux__) && defined(__aarch64__) && defined(HWCAP_ASIMDDP)
bool llamac_has_dotprod(void) { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
#elif defined(__APPLE__)
static bool has(const char *feature) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(feature, &value, &size, NULL, 0) && value;
}
bool llamac_has_dotprod(void) { return has("hw.optional.arm.FEAT_DotProd"); }
#else
bool llamac_has_dotprod(void) { return false; }
#endif

#if defined(__linux__) && defined(__aarch64__) && defined(HWCAP2_I8MM)
bool llamac_has_i8mm(void) { return getauxval(AT_HWCAP2) & HWCAP2_I8MM; }
#elif defined(__APPLE__)
bool llamac_has_i8mm(void) { return has("hw.optional.arm.FEAT_I8MM"); }
#else
bool llamac_has_i8mm(void) { return false; }
#endif

static void *run_thread(void *thread) {
    Thread *t = thread;
    t->run(t->arg);
    return NULL;
}

bool llamac_start_thread(Thread *t, void (*run)(void *), void *arg) {
    t->run = run, t->arg = arg;
    return !pthread_create(&t->handle, NULL, run_thread, t);
}

void llamac_join_thread(Thread *t) { pthread_join(t->handle, NULL); }

void llamac_yield(void) { sched_yield(); }

void llamac_open_monitor(Monitor *m) {
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->wake, NULL);
}

void llamac_close_monitor(Monitor *m) {
    pthread_cond_destroy(&m->wake);
    pthread_mutex_destroy(&m->lock);
}

void llamac_lock(Monitor *m) { pthread_mutex_lock(&m->lock); }
void llamac_unlock(Monitor *m) { pthread_mutex_unlock(&m->lock); }
void llamac_sleep(Monitor *m) { pthread_cond_wait(&m->wake, &m->lock); }
void llamac_wake_all(Monitor *m) { pthread_cond_broadcast(&m->wake); }

bool llamac_stderr_is_terminal(void) { return isatty(2); }

uint64_t llamac_peak_memory(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
#ifdef __APPLE__
    return (uint64_t)used.ru_maxrss; // bytes there, KiB elsewhere
#else
    return (uint64_t)used.ru_maxrss * 1024;
#endif
}

// Reading a truncated mapping raises SIGBUS: another program may have truncated the model file.
static void end_by_signal(int number) {
    ssize_t written = write(2, file_cut_off, sizeof file_cut_off - 1);
    (void)number, (void)written;
    _exit(1);
}

void llamac_begin_program(int *argc, char ***argv) {
    (void)argc, (void)argv;
    // A stream that the caller has closed stays empty: else the model file would become stdin.
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= 2);
    if (fd > 2) close(fd);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGBUS, end_by_signal);
}

int64_t llamac_read_input(char *bytes, size_t n, bool wait) {
    struct pollfd ready = {.fd = 0, .events = POLLIN};
    for (;;) {
        if (poll(&ready, 1, wait ? -1 : 0) == 0) return LLAMAC_INPUT_LATER;
        ssize_t got = read(0, bytes, n);
        if (got >= 0 || (errno != EINTR && errno != EAGAIN)) return got;
    }
}

#endif
// ----------------------------------------------------------------------------
// Files

FILE *llamac_open_file(const char *path) { return open_stream(path); }

bool llamac_is_folder(const char *path) { return kind_at(path, true) == FOLDER; }

bool llamac_may_exist(const char *path) { return kind_at(path, true) != NOTHING; }

// Opens a regular file that is not empty. Writes its descriptor and its size.
static bool open_file(const char *path, int *file, size_t *size, Error *e) {
    CHECK(path, "the path is NULL");
    CHECK(*path, "the path is empty");
    *file = open_descriptor(path);
    CHECK(*file >= 0 || errno != ENOENT, "no such file");
    CHECK(*file >= 0 || errno != EISDIR, "not a regular file");
    CHECK(*file >= 0, "%s", strerror(errno));
    uint64_t bytes;
    Kind kind = kind_of(*file, &bytes);
    bool ok = kind == REGULAR_FILE && bytes > 0;
    if (kind == CANNOT_TELL) fail(e, "%s", strerror(errno));
    else if (kind != REGULAR_FILE) fail(e, "not a regular file");
    else if (!bytes) fail(e, "the file is empty");
    if (!ok) close_descriptor(*file);
    else *size = bytes;
    return ok;
}

bool llamac_map_file(const char *path, File *mapped, Error *e) {
    int file;
    size_t size;
    TRY(open_file(path, &file, &size, e));
    void *bytes = map_descriptor(file, size);
    if (!bytes) fail(e, "%s", strerror(errno)), close_descriptor(file);
    if (!bytes) return false;
    *mapped = (File){bytes, size, file};
    // large pages in the page cache serve later processes too
    llamac_use_large_pages(bytes, size);
    return true;
}

// Reads the bytes from `begin` on, up to `end` or the end of the file, to the same place in
// `bytes`. Returns where they end, or -1 after an error.
static int64_t read_range(int file, uint8_t *bytes, size_t begin, size_t end) {
    int64_t got = 1;
    for (; begin < end && got > 0; begin += got > 0 ? got : 0)
        got = read_at(file, bytes + begin, end - begin, begin);
    return got < 0 ? -1 : (int64_t)begin;
}

uint8_t *llamac_read_file(const char *path, const void *magic, size_t n, size_t *size, Error *e) {
    int file;
    if (!open_file(path, &file, size, e)) return NULL;
    uint8_t *bytes = resize(NULL, n, 1), *whole = NULL;
    int64_t end = bytes ? read_range(file, bytes, 0, n) : 0;
    if (end == (int64_t)n && *size >= n && !memcmp(bytes, magic, n)) {
        if ((whole = resize(bytes, *size, 1))) end = read_range(file, whole, n, *size);
        else free(bytes);
        bytes = whole;
    }
    if (!bytes) fail(e, no_memory);
    else if (end < 0) fail(e, "%s", strerror(errno));
    close_descriptor(file);
    if (end < 0) free(bytes), bytes = NULL;
    *size = end < 0 ? 0 : (size_t)end;
    return bytes;
}

bool llamac_read_mapped(const File *file, uint8_t *bytes, size_t at, size_t n) {
    return read_range(file->descriptor, bytes - at, at, at + n) == (int64_t)(at + n);
}

void llamac_unmap(File *file) {
    if (file->bytes) unmap((void *)file->bytes, file->size), close_descriptor(file->descriptor);
    *file = (File){0};
}

// Returns the path of the file that `path` names, to be freed. If `path` is a symbolic link, that
// is the file at the end of it, because moving another file to `path` would replace the link.
static char *follow_link(const char *path, Error *e) {
    char *target;
    if (kind_at(path, false) == LINK) {
        target = end_of_link(path);
        if (!target)
            fail(e, "the symbolic link cannot be followed (%s): name another file",
                 strerror(errno));
        return target;
    }
    target = resize(NULL, strlen(path), 1);
    if (!target) return fail(e, no_memory), NULL;
    return strcpy(target, path);
}

// Fails if something is at `path` that is not a regular file beginning with the n bytes of `magic`.
static bool may_replace(const char *path, const void *magic, size_t n, Error *e) {
    uint8_t found[64];
    Kind kind = kind_at(path, false);
    if (kind == NOTHING) return true;
    CHECK(kind != CANNOT_TELL, "%s", strerror(errno));
    CHECK(kind == REGULAR_FILE, "not a regular file: name another file");
    FILE *file = open_stream(path);
    CHECK(file, "%s", strerror(errno));
    bool same = fread(found, 1, n, file) == n && !memcmp(found, magic, n);
    fclose(file);
    CHECK(same, "the file exists and is not a saved sequence: name another file");
    return true;
}

// Creates the file beside its target.
static bool create_beside(NewFile *file, Error *e) {
    size_t length = strlen(file->target);
    char *name = resize(NULL, length + 8, 1);
    CHECK(name, no_memory);
    memcpy(name, file->target, length);
    strcpy(name + length, ".XXXXXX");
    FILE *stream = create_unique(name);
    if (!stream) {
        fail(e, "cannot create a temporary file in its folder: %s", strerror(errno));
        free(name);
        return false;
    }
    file->stream = stream, file->name = name;
    return true;
}

bool llamac_create_file(NewFile *file, const char *path, const void *magic, size_t n, Error *e) {
    CHECK(path, "the path is NULL");
    CHECK(*path, "the path is empty");
    *file = (NewFile){.target = follow_link(path, e)};
    TRY(file->target);
    bool ok = may_replace(file->target, magic, n, e) && create_beside(file, e);
    if (!ok) free(file->target), *file = (NewFile){0};
    return ok;
}

bool llamac_finish_file(NewFile *file, bool ok, Error *e) {
    bool written = ok && !fflush(file->stream) && sync_file(file->stream);
    if (ok && !written) fail(e, "%s", strerror(errno));
    bool closed = !fclose(file->stream);
    if (written && !closed) fail(e, "%s", strerror(errno));
    bool moved = written && closed && move_file(file->name, file->target);
    if (written && closed && !moved) fail(e, "%s", strerror(errno));
    if (!moved) remove_file(file->name);
    free(file->name);
    free(file->target);
    *file = (NewFile){0};
    return moved;
}

// ----------------------------------------------------------------------------
// Memory and processors

void llamac_drop_pages(const uint8_t *begin, const uint8_t *end) {
    uintptr_t page = page_size();
    uintptr_t first = ((uintptr_t)begin + page - 1) / page * page;
    uintptr_t last = (uintptr_t)end / page * page;
    if (first < last) drop_whole_pages((void *)first, last - first);
}

int llamac_default_threads(void) {
    long cores = usable_cores();
    return cores < 1 ? 1 : cores > 64 ? 64 : (int)cores;
}

#endif // not WebAssembly
