#!/bin/bash
# What comes after an attempt, once all its ranks have ended:
#
#     verdict.sh RUN_DIR ATTEMPT STATUS MAX_RESTARTS REQUEUE
#
# STATUS is what the first rank or step to end ended with, MAX_RESTARTS is cluster.requeue.max_restarts and REQUEUE (true, false)
# cluster.requeue.enabled. The verdict is printed and left in attempts/ATTEMPT/verdict. Exits with
#     0    done         the run is complete
#     75   requeue: why start all ranks again, from the last checkpoint
#     else stop: why    STATUS, or 1 where that is 0 or 75
#
# The rules, in this order (the files are those of pipeline/attempt.py):
#  1. done.json is there: done, however the ranks ended after they had written it.
#  2. An attempt of another job has started since and taken the run over (`current`): stop, or the two would do so by turns.
#  3. The ranks left on purpose (`requeue` is there, and no failure.json): requeue, if REQUEUE; but stop if neither this
#     attempt nor the one before, which left on purpose too, completed a checkpoint: that would go on for ever.
#  4. All else is a crash: requeue, if REQUEUE and the attempt completed a checkpoint (`progress`) or failed the check of its nodes
#     (`bad_nodes`, which the next start avoids), and fewer than MAX_RESTARTS crashes have been restarted before.
#  5. A verdict that cannot be written is stop: without it nobody could count.
#
# Attempts of one job are JOB-0, JOB-1 ...; those of other submissions count for nothing, so a resubmission has a fresh budget.
# Bash and coreutils alone: under Slurm it runs on a bare node, outside of any container.

set -u
shopt -s nullglob
if [[ $# != 5 ]]; then
    echo "verdict.sh: RUN_DIR ATTEMPT STATUS MAX_RESTARTS REQUEUE" >&2
    exit 2
fi
run_dir=$1 attempt=$2 status=$3 max_restarts=$4 requeue=$5
attempts=$run_dir/attempts
own=$attempts/$attempt
SETTLE_S=${HETSTEP_SETTLE_S:-3} # how long ranks' last words may take to be seen here, on a shared file system

# Whether FOLDER has NAME. It is listed, because an NFS client remembers that a single name was not there.
has() {
    local path
    for path in "$1"/*; do
        [[ ${path##*/} == "$2" ]] && return 0
    done
    return 1
}

# The restarts of this job before this one, by number, oldest first.
earlier() {
    local folder number
    for folder in "$attempts/${attempt%-*}"-*/; do
        number=${folder%/} number=${number##*-}
        [[ $number =~ ^[0-9]+$ ]] && ((number < ${attempt##*-})) && echo "$number"
    done | sort -n
}

left_on_purpose() { has "$1" requeue && ! has "$1" failure.json; }

restarted_crashes() {
    local count=0 number folder
    for number in $(earlier); do
        folder=$attempts/${attempt%-*}-$number
        left_on_purpose "$folder" || { grep -qs '^requeue' "$folder/verdict" && count=$((count + 1)); }
    done
    echo "$count"
}

# Neither this attempt nor the one before it, both left on purpose, completed a checkpoint.
goes_nowhere() {
    local last folder
    last=$(earlier | tail -n 1)
    folder=$attempts/${attempt%-*}-$last
    ! has "$own" progress && [[ -n $last ]] && left_on_purpose "$folder" && ! has "$folder" progress
}

# Prints the attempt of another job that may write into the run folder, if it started after this one. (One that started before
# is named there until this attempt has claimed the folder.)
superseded_by() {
    local current
    current=$(cat "$attempts/current" 2>/dev/null) || return
    [[ ${current%-*} != "${attempt%-*}" && $(<"$attempts/$current/started") > $(<"$own/started") ]] && echo "$current"
}

# Prints `RANK (COMPONENT)` of failure.json, the rank that failed first. Nothing if there is no such file.
failed_first() { sed -nE 's/^\{"rank": ([0-9]+), "realm": "(\w+)".*/rank \1 (\2)/p' "$own/failure.json" 2>/dev/null; }

judge() {
    local why restarted first
    if has "$run_dir" done.json; then
        echo "done"
    elif why=$(superseded_by); then
        echo "stop: attempt $why, of another job, has taken the run over"
    elif left_on_purpose "$own"; then
        why=$(<"$own/requeue")
        if [[ $requeue != true ]]; then
            echo "stop: $why; cluster.requeue.enabled is false"
        elif goes_nowhere; then
            echo "stop: two starts in a row were left without a new checkpoint ($why); the time of one allocation," \
                "cluster.time_min or checkpointing.checkpoint_must_save_by, must suffice for the start, a step and a save, or" \
                "for checkpointing.save_period steps"
        else
            echo "requeue: $why"
        fi
    else
        why="crashed with status $status"
        if first=$(failed_first) && [[ $first ]]; then
            # 123 and 124 say that a rank ended because of another (pipeline/watchdog.py).
            [[ $status == 12[34] ]] && why=crashed
            why="$why: $first failed first"
        fi
        [[ $status == 0 ]] && why="all ranks ended with status 0, but the run is not complete: there is no done.json"
        has "$own" bad_nodes && why="nodes failed their checks ($(paste -sd ';' "$own/bad_nodes"))"
        restarted=$(restarted_crashes)
        if [[ $requeue != true ]]; then
            echo "stop: $why; cluster.requeue.enabled is false"
        elif ! has "$own" progress && ! has "$own" bad_nodes; then
            echo "stop: $why, without a new checkpoint since its start"
        elif ((restarted >= max_restarts)); then
            echo "stop: $why, and $restarted crashes were restarted before (cluster.requeue.max_restarts: $max_restarts)"
        else
            echo "requeue: $why, after checkpoint $(cat "$own/progress" 2>/dev/null || echo none);" \
                "restart $((restarted + 1)) of $max_restarts"
        fi
    fi
}

if [[ $status == 0 ]]; then # then they have left word, which another node may not see at once
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
