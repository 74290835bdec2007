/* A file system that fails on demand, for what no real one here can be made to do: LD_PRELOAD stands before libc's calls.
 *
 * HETSTEP_TEST_DISK is a folder; HETSTEP_TEST_FAULT_FILE a file outside of it with "ERRNO SECONDS READS". While that is so,
 * calls that change something below the folder fail with ERRNO (0: they work) after SECONDS; with READS 1 opening for reading
 * fails too. Covers Python and Rust alike, not what is written through a memory map.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(const char *path, int reading)
{
	const char *disk = getenv("HETSTEP_TEST_DISK"), *control = getenv("HETSTEP_TEST_FAULT_FILE");
	if (!disk || !control || !path || strncmp(path, disk, strlen(disk)) != 0)
		return 0;
	char text[64] = "";
	int fd = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY), number = 0, reads = 0;
	double seconds = 0;
	if (fd < 0)
		return 0;
	syscall(SYS_read, fd, text, sizeof text - 1);
	syscall(SYS_close, fd);
	sscanf(text, "%d %lf %d", &number, &seconds, &reads);
	if (reading && !reads)
		return 0;
	if (seconds > 0)
		usleep(seconds * 1e6);
	errno = number;
	return number != 0;
}

static int descriptor_fails(int fd)
{
	char link[64], path[PATH_MAX];
	int before = errno;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof path - 1);
	errno = before;
	if (n < 0)
		return 0;
	path[n] = 0;
	return fails(path, 0);
}

static const char *absolute(const char *path, char *buffer)
{
	if (!path || path[0] == '/' || !getcwd(buffer, PATH_MAX))
		return path;
	strncat(buffer, "/", PATH_MAX - strlen(buffer) - 1);
	return strncat(buffer, path, PATH_MAX - strlen(buffer) - 1);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define PATH_FAILS(path, reading) ({ char buffer[PATH_MAX]; fails(absolute(path, buffer), reading); })
#define MODE(flags) \
	mode_t mode = 0; \
	if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
#define CHANGES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT))

int open(const char *path, int flags, ...)
{
	MODE(flags)
	return PATH_FAILS(path, !CHANGES(flags)) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...)
{
	MODE(flags)
	return PATH_FAILS(path, !CHANGES(flags)) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...)
{
	MODE(flags)
	return PATH_FAILS(path, !CHANGES(flags)) ? -1 : REAL(openat)(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...)
{
	MODE(flags)
	return PATH_FAILS(path, !CHANGES(flags)) ? -1 : REAL(openat64)(folder, path, flags, mode);
}
ssize_t write(int fd, const void *data, size_t size) { return descriptor_fails(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *parts, int n) { return descriptor_fails(fd) ? -1 : REAL(writev)(fd, parts, n); }
int fsync(int fd) { return descriptor_fails(fd) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return descriptor_fails(fd) ? -1 : REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { return descriptor_fails(fd) ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return descriptor_fails(fd) ? -1 : REAL(ftruncate64)(fd, size); }
int mkdir(const char *path, mode_t mode) { return PATH_FAILS(path, 0) ? -1 : REAL(mkdir)(path, mode); }
int unlink(const char *path) { return PATH_FAILS(path, 0) ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return PATH_FAILS(path, 0) ? -1 : REAL(rmdir)(path); }
int rename(const char *from, const char *to) { return PATH_FAILS(to, 0) ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return PATH_FAILS(to, 0) ? -1 : REAL(link)(from, to); }
int symlink(const char *target, const char *path) { return PATH_FAILS(path, 0) ? -1 : REAL(symlink)(target, path); }
