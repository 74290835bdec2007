#!/bin/bash
# Decide what follows an attempt, after all its ranks have ended:
#
#     verdict.sh RUN_DIR ATTEMPT STATUS MAX_RESTARTS REQUEUE
#
# STATUS is the exit status of the first rank or step that ended, MAX_RESTARTS is cluster.requeue.max_restarts, and REQUEUE
# (true, false) is cluster.requeue.enabled. The verdict is printed and written to attempts/ATTEMPT/verdict. Exit status:
#     0    done         the run is complete
#     75   requeue: why start all ranks again, from the last checkpoint
#     else stop: why    STATUS, or 1 if STATUS is 0 or 75
#
# The rules, in this order (the files are those of pipeline/job/attempt.py):
#  1. done.json exists: done, however the ranks ended after they wrote it.
#  2. A later attempt of another job has taken over the run (`current`): stop, or the two jobs would take over in turn.
#  3. The ranks exited on purpose (`requeue` exists, and no failure.json): requeue, if REQUEUE; but stop if neither this attempt
#     nor the one before, which exited on purpose too, completed a checkpoint: the job would requeue forever.
#  4. Anything else is a crash: requeue, if REQUEUE, the attempt completed a checkpoint (`progress`) or failed its node checks
#     (`bad_nodes`, which the next start avoids), and fewer than MAX_RESTARTS crashes were restarted before.
#  5. If the attempt was asked to stop (`stop`), 3 and 4 stop.
#  6. If the verdict cannot be written: stop, because later attempts could not count this restart.
#
# Attempts of one job are JOB-0, JOB-1 ...; those of other submissions do not count, so a resubmission has a fresh budget.
# Only bash and coreutils are used, because under Slurm the script runs on a bare node, outside of any container.

set -u
shopt -s nullglob
if [[ $# != 5 ]]; then
    echo "verdict.sh: RUN_DIR ATTEMPT STATUS MAX_RESTARTS REQUEUE" >&2
    exit 2
fi
run_dir=$1 attempt=$2 status=$3 max_restarts=$4 requeue=$5
attempts=$run_dir/attempts
own=$attempts/$attempt
SETTLE_S=${HETSTEP_SETTLE_S:-3} # how late files of the ranks may appear here, on a shared file system

# has FOLDER NAME: whether the file exists. The folder is listed, because an NFS client caches that a single name is missing.
has() {
    local path
    for path in "$1"/*; do
        [[ ${path##*/} == "$2" ]] && return 0
    done
    return 1
}

# Print the numbers of this job's earlier restarts, oldest first.
earlier() {
    local folder number
    for folder in "$attempts/${attempt%-*}"-*/; do
        number=${folder%/} number=${number##*-}
        [[ $number =~ ^[0-9]+$ ]] && ((number < ${attempt##*-})) && echo "$number"
    done | sort -n
}

exited_on_purpose() { has "$1" requeue && ! has "$1" failure.json; }

restarted_crashes() {
    local count=0 number folder
    for number in $(earlier); do
        folder=$attempts/${attempt%-*}-$number
        exited_on_purpose "$folder" || { grep -qs '^requeue' "$folder/verdict" && count=$((count + 1)); }
    done
    echo "$count"
}

# Whether neither this attempt nor the one before it, both exited on purpose, completed a checkpoint.
makes_no_progress() {
    local last folder
    last=$(earlier | tail -n 1)
    folder=$attempts/${attempt%-*}-$last
    ! has "$own" progress && [[ -n $last ]] && exited_on_purpose "$folder" && ! has "$folder" progress
}

# Print the attempt of another job that owns the run folder, if it started after this one. (`current` names an older attempt
# until this attempt has claimed the folder.)
superseded_by() {
    local current
    current=$(cat "$attempts/current" 2>/dev/null) || return
    [[ ${current%-*} != "${attempt%-*}" && $(<"$attempts/$current/started") > $(<"$own/started") ]] && echo "$current"
}

# Print `rank RANK (COMPONENT)` of the rank that failed first, from failure.json; nothing without that file.
failed_first() { sed -nE 's/^\{"rank": ([0-9]+), "realm": "(\w+)".*/rank \1 (\2)/p' "$own/failure.json" 2>/dev/null; }

judge() {
    local why restarted first saved=checkpoint
    has "$run_dir" answers && saved=answer # an evaluation
    if has "$run_dir" done.json; then
        echo "done"
    elif why=$(superseded_by); then
        echo "stop: attempt $why, of another job, has taken the run over"
    elif exited_on_purpose "$own"; then
        why=$(<"$own/requeue")
        if has "$own" stop; then
            echo "stop: saved and stopped, as asked"
        elif [[ $requeue != true ]]; then
            echo "stop: $why; cluster.requeue.enabled is false"
        elif makes_no_progress; then
            echo "stop: two starts in a row were left without a new $saved ($why); the time of one allocation," \
                "cluster.time_min or checkpointing.checkpoint_must_save_by, must suffice for the start, a step and a save, or" \
                "for checkpointing.save_period steps"
        else
            echo "requeue: $why"
        fi
    else
        why="crashed with status $status"
        if first=$(failed_first) && [[ $first ]]; then
            # A rank exits with 123 or 124 because of another one (pipeline/job/watchdog.py).
            [[ $status == 12[34] ]] && why=crashed
            why="$why: $first failed first"
        fi
        [[ $status == 0 ]] && why="all ranks ended with status 0, but the run is not complete: there is no done.json"
        has "$own" bad_nodes && why="nodes failed their checks ($(paste -sd ';' "$own/bad_nodes"))"
        restarted=$(restarted_crashes)
        if has "$own" stop; then
            echo "stop: $why; it is not restarted, because it was asked to stop"
        elif [[ $requeue != true ]]; then
            echo "stop: $why; cluster.requeue.enabled is false"
        elif ! has "$own" progress && ! has "$own" bad_nodes; then
            echo "stop: $why, without a new $saved since its start"
        elif ((restarted >= max_restarts)); then
            echo "stop: $why, and $restarted crashes were restarted before (cluster.requeue.max_restarts: $max_restarts)"
        else
            echo "requeue: $why, after $saved $(cat "$own/progress" 2>/dev/null || echo none);" \
                "restart $((restarted + 1)) of $max_restarts"
        fi
    fi
}

if [[ $status == 0 ]]; then # the ranks have written a file, which may appear late on this node
    for ((waited = 0; waited < SETTLE_S; waited++)); do
        has "$run_dir" done.json || has "$own" requeue && break
        sleep 1
    done
fi
verdict=$(judge)
if ! { echo "$verdict" >"$own/.verdict.$$" && mv -fT "$own/.verdict.$$" "$own/verdict"; }; then
    [[ $verdict == done ]] || verdict="stop: the verdict cannot be written into $own ($verdict)"
fi
echo "$verdict"
case $verdict in
done) exit 0 ;;
requeue:*) exit 75 ;;
esac
[[ $status == 0 || $status == 75 ]] && exit 1
exit "$status"
