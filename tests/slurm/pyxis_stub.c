/*
 * A SPANK plugin that takes the options of pyxis (https://github.com/NVIDIA/pyxis, 0.24) and runs tasks without a container.
 *
 * It refuses what pyxis refuses: an option that it does not know, one that is given twice with two values, a mount of a wrong
 * form, an empty value, an image or a mount's source that is not there, a folder that tasks cannot start in. As pyxis does, it
 * leaves a mount's flags to whoever mounts. An image that says that it has inodes counts as corrupt, and ends the step's tasks
 * with the words of pyxis and enroot. It is stricter in
 * what pyxis would let pass or only warn of: container options without an image, an image in a registry (there is none here),
 * a working folder that is not absolute, a variable in --container-env that is not set. What a task got is left in a
 * file of the folder that plugstack.conf names (record=FOLDER), <job>.<step>.<task>, a line `key=value` each.
 *
 * With use_squashfuse=1 in plugstack.conf each task has a child that stands for the processes of enroot: the stopped shell and
 * squashfuse, on which the root file system hangs. SIGCONT, SIGTERM and SIGUSR2 end it, and the task gets SIGBUS, as it does at
 * the next page that it reads from a root file system that is gone. Slurm signals such a child as it does the real ones.
 *
 * It leaves out the container itself: tasks see the node's own files.
 *
 *   gcc -shared -fPIC -o pyxis_stub.so pyxis_stub.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis_stub, 1)

#define REFUSE(...) return (slurm_error("pyxis stub: " __VA_ARGS__), -1)

enum text { IMAGE, WORKDIR, NAME, SAVE, TEXTS };
enum flag { MOUNT_HOME, REMAP_ROOT, ENTRYPOINT, ENTRYPOINT_LOG, WRITABLE, FLAGS };

static const char *const text_names[TEXTS] = {"container-image", "container-workdir", "container-name", "container-save"};
static const char *const flag_names[FLAGS] = {
	"container-mount-home", "container-remap-root", "container-entrypoint", "container-entrypoint-log", "container-writable"};

static char *texts[TEXTS];
static int flags[FLAGS] = {-1, -1, -1, -1, -1};
static char *mounts, *env, *unshare_; /* as given; several are joined by commas */
static const char *record; /* the folder */
static bool use_squashfuse;

/* ---- options ---- */

static int take_text(enum text which, const char *value)
{
	if (value == NULL || *value == '\0')
		REFUSE("--%s: argument required", text_names[which]);
	if (texts[which] != NULL && strcmp(texts[which], value) != 0)
		REFUSE("--%s specified multiple times", text_names[which]);
	if (texts[which] == NULL)
		texts[which] = strdup(value);
	return 0;
}

static int take_flag(enum flag which, int value)
{
	if (flags[which] != -1 && flags[which] != value)
		REFUSE("both --%s and its opposite were specified", flag_names[which]);
	flags[which] = value;
	return 0;
}

static int take_list(char **list, const char *option, const char *value)
{
	if (value == NULL || *value == '\0')
		REFUSE("--%s: argument required", option);
	if (*list != NULL && strcmp(*list, value) == 0)
		return 0; /* Slurm may hand over an option twice */
	char *joined = NULL;
	if (asprintf(&joined, "%s%s%s", *list ? *list : "", *list ? "," : "", value) < 0)
		REFUSE("no memory");
	free(*list);
	*list = joined;
	return 0;
}

static int image(int val, const char *arg, int remote) { return take_text(IMAGE, arg); }
static int workdir(int val, const char *arg, int remote) { return take_text(WORKDIR, arg); }
static int name(int val, const char *arg, int remote) { return take_text(NAME, arg); }
static int save(int val, const char *arg, int remote) { return take_text(SAVE, arg); }
static int mount_home(int val, const char *arg, int remote) { return take_flag(MOUNT_HOME, val); }
static int remap_root(int val, const char *arg, int remote) { return take_flag(REMAP_ROOT, val); }
static int entrypoint(int val, const char *arg, int remote) { return take_flag(ENTRYPOINT, val); }
static int entrypoint_log(int val, const char *arg, int remote) { return take_flag(ENTRYPOINT_LOG, val); }
static int writable(int val, const char *arg, int remote) { return take_flag(WRITABLE, val); }
static int mount(int val, const char *arg, int remote) { return take_list(&mounts, "container-mounts", arg); }
static int namespaces(int val, const char *arg, int remote) { return take_list(&unshare_, "container-unshare", arg); }
static int environment(int val, const char *arg, int remote) { return take_list(&env, "container-env", arg); }

static struct spank_option options[] = {
	{"container-image", "IMAGE", "[pyxis stub] image", 1, 0, image},
	{"container-mounts", "SRC:DST[:FLAGS][,...]", "[pyxis stub] bind mounts", 1, 0, mount},
	{"container-workdir", "PATH", "[pyxis stub] working folder", 1, 0, workdir},
	{"container-name", "NAME", "[pyxis stub] name", 1, 0, name},
	{"container-save", "PATH", "[pyxis stub] where to save it", 1, 0, save},
	{"container-mount-home", NULL, "[pyxis stub] mount the home", 0, 1, mount_home},
	{"no-container-mount-home", NULL, "[pyxis stub] do not", 0, 0, mount_home},
	{"container-remap-root", NULL, "[pyxis stub] become root inside", 0, 1, remap_root},
	{"no-container-remap-root", NULL, "[pyxis stub] do not", 0, 0, remap_root},
	{"container-entrypoint", NULL, "[pyxis stub] run the entrypoint", 0, 1, entrypoint},
	{"no-container-entrypoint", NULL, "[pyxis stub] do not", 0, 0, entrypoint},
	{"container-entrypoint-log", NULL, "[pyxis stub] print its output", 0, 1, entrypoint_log},
	{"container-writable", NULL, "[pyxis stub] writable", 0, 1, writable},
	{"container-readonly", NULL, "[pyxis stub] read-only", 0, 0, writable},
	{"container-env", "NAME[,NAME...]", "[pyxis stub] variables that go before the image's", 1, 0, environment},
	{"container-unshare", "NS[,NS...]", "[pyxis stub] new namespaces", 1, 1, namespaces},
	SPANK_OPTIONS_TABLE_END};

int slurm_spank_init(spank_t sp, int argc, char **argv)
{
	for (int i = 0; i < argc; ++i)
		if (strncmp(argv[i], "record=", 7) == 0)
			record = strdup(argv[i] + 7);
		else if (strcmp(argv[i], "use_squashfuse=1") == 0)
			use_squashfuse = true;
	if (spank_context() == S_CTX_SLURMD || spank_context() == S_CTX_JOB_SCRIPT)
		return 0;
	for (int i = 0; options[i].name != NULL; ++i)
		if (spank_option_register(sp, &options[i]) != ESPANK_SUCCESS)
			REFUSE("cannot register --%s", options[i].name);
	return 0;
}

/* ---- what they must be ---- */

static int check_mount(char *text)
{
	char *source = strsep(&text, ":");
	char *target = text ? strsep(&text, ":") : source;
	if (*source == '\0' || *target == '\0')
		REFUSE("--container-mounts: invalid format: %s", source);
	if (strcmp(source, "tmpfs") != 0 && strcmp(source, "umount") != 0) {
		if (strchr("./", *source) == NULL)
			REFUSE("mount source must be a path, \"tmpfs\" or \"umount\": %s", source);
		if (access(source, F_OK) != 0)
			REFUSE("no such file to mount: %s", source);
	}
	if (strchr("./", *target) == NULL)
		REFUSE("mount target must be a path: %s", target);
	return 0;
}

static int for_each(const char *list, int (*check)(char *))
{
	char *copy = list ? strdup(list) : NULL, *rest = copy, *entry;
	int status = 0;
	while (status == 0 && rest != NULL && (entry = strsep(&rest, ",")) != NULL)
		status = check(entry);
	free(copy);
	return status;
}

static bool any_option(void)
{
	for (int i = 0; i < FLAGS; ++i)
		if (flags[i] != -1)
			return true;
	return mounts || env || unshare_ || texts[WORKDIR] || texts[SAVE];
}

int slurm_spank_init_post_opt(spank_t sp, int argc, char **argv)
{
	if (spank_context() != S_CTX_LOCAL && spank_context() != S_CTX_REMOTE)
		return 0;
	if (texts[IMAGE] == NULL && texts[NAME] == NULL && any_option())
		REFUSE("container options, but neither --container-image nor --container-name");
	if (texts[WORKDIR] != NULL && *texts[WORKDIR] != '/')
		REFUSE("--container-workdir: not absolute: %s", texts[WORKDIR]);
	return for_each(mounts, check_mount);
}

/* On the node, where pyxis fetches the image and starts the container. */
int slurm_spank_user_init(spank_t sp, int argc, char **argv)
{
	struct stat found;

	if (texts[IMAGE] == NULL)
		return 0;
	if (strchr("./", *texts[IMAGE]) == NULL)
		REFUSE("there is no registry to fetch %s from", texts[IMAGE]);
	if (stat(texts[IMAGE], &found) != 0 || !S_ISREG(found.st_mode))
		REFUSE("no such image: %s", texts[IMAGE]);
	return 0;
}

/* ---- a task ---- */

static spank_t task;
static FILE *out;

static int record_variable(char *variable)
{
	char value[4096];
	spank_err_t error = *variable ? spank_getenv(task, variable, value, sizeof(value)) : ESPANK_ENV_NOEXIST;
	if (error != ESPANK_SUCCESS)
		REFUSE("--container-env: '%s' is not set: %s", variable, spank_strerror(error));
	fprintf(out, "env:%s=%s\n", variable, value);
	return 0;
}

/* As pyxis and enroot tell of an image that cannot be unpacked or mounted; neither names it. */
static int check_image(void)
{
	char start[8] = "";
	FILE *file = fopen(texts[IMAGE], "r");

	if (file != NULL) {
		fread(start, 1, sizeof(start), file);
		fclose(file);
	}
	if (memcmp(start, "hsqs\0\0\0", sizeof(start)) == 0) /* with no inodes, as the tests make them */
		return 0;
	slurm_error("pyxis: container start failed with error code: 1");
	slurm_error("pyxis: printing enroot log file:");
	slurm_error("pyxis:     This doesn't look like a squashfs image.");
	return -1;
}

static void root_is_gone(int number)
{
	kill(getppid(), SIGBUS);
	_exit(0);
}

static int start_squashfuse(void)
{
	const int ends[] = {SIGCONT, SIGTERM, SIGUSR2};
	sigset_t none;
	pid_t parent = getpid(), child = fork();

	if (child < 0)
		REFUSE("no squashfuse: %s", strerror(errno));
	if (child > 0)
		return 0;
	prctl(PR_SET_NAME, "squashfuse");
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(0);
	for (int i = 0; i < 3; ++i)
		signal(ends[i], root_is_gone);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	close_range(0, ~0U, 0); /* srun waits until nobody can print for a task any more */
	for (;;)
		pause();
}

int slurm_spank_task_init(spank_t sp, int argc, char **argv)
{
	uint32_t job = 0, step = 0, rank = 0;
	char path[PATH_MAX];
	int status;

	if (texts[IMAGE] == NULL && texts[NAME] == NULL)
		return 0;
	if (texts[IMAGE] != NULL && check_image() != 0)
		return -1;
	if (use_squashfuse && start_squashfuse() != 0)
		return -1;
	if (texts[WORKDIR] != NULL && chdir(texts[WORKDIR]) != 0)
		REFUSE("couldn't chdir to %s: %s", texts[WORKDIR], strerror(errno));
	if (record == NULL)
		return 0;
	spank_get_item(sp, S_JOB_ID, &job);
	spank_get_item(sp, S_JOB_STEPID, &step);
	spank_get_item(sp, S_TASK_GLOBAL_ID, &rank);
	snprintf(path, sizeof(path), "%s/%u.%u.%u", record, job, step, rank);
	if ((out = fopen(path, "w")) == NULL)
		REFUSE("cannot write %s: %s", path, strerror(errno));
	for (int i = 0; i < TEXTS; ++i)
		if (texts[i] != NULL)
			fprintf(out, "%s=%s\n", text_names[i], texts[i]);
	for (int i = 0; i < FLAGS; ++i)
		if (flags[i] != -1)
			fprintf(out, "%s=%d\n", flag_names[i], flags[i]);
	fprintf(out, "container-mounts=%s\n", mounts ? mounts : "");
	task = sp;
	status = for_each(env, record_variable);
	fclose(out);
	return status;
}
