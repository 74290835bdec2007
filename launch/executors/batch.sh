# What every batch script does around its steps; slurm.py puts this text, and that of verdict.sh as the function
# `verdict`, into each, so that a job does not change with the code while it waits and runs. Set before: HETSTEP_RUN_DIR, _JOB_ID
# and _ATTEMPT; `max_restarts` and `requeue` (true, false), as verdict.sh takes them. Set between begin_attempt and end_attempt:
# `steps`, process id of an srun -> COMPONENT FIRST_RANK.
#
# A signal that asks the ranks to save and leave comes to this script alone (--signal=B:USR2@..., scancel --batch), which tells
# rank 0 by a file: where pyxis mounts an image with squashfuse, a signal to a step ends squashfuse, and with it the root file
# system of the step's ranks. So the script sends no signal to a step as long as its ranks have something to do.
# When Slurm ends a job it signals everything: SIGTERM must not end the script before its steps, whose ranks save then if they
# can: KillWait is for both.

ANSWER_S=300      # how long slurmctld may be down before a decision is made without it
STEP_PATIENCE_S=15 # for the other steps to end by themselves, when one has failed

# ---- asking Slurm ----

# The leading component's line of `scontrol show job`, whatever the user wants times to look like. Fails if slurmctld does not
# answer for long.
ask_slurm() {
    local deadline=$((SECONDS + ANSWER_S))
    until SLURM_TIME_FORMAT=standard timeout 30 scontrol show job -o "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID "; do
        ((SECONDS < deadline)) || return 1
        sleep 5
    done
}

# KEY LINE: its value. The first of that name counts: newer Slurm ends with free text.
field() { [[ " $2" =~ \ $1=([^\ ]*) ]] && echo "${BASH_REMATCH[1]}"; }

# What Slurm has decided about the job meanwhile: `open`, nothing (or that its time is up, after which Slurm itself restarts no
# job); `requeued`, by Slurm (preempted, a node lost) or by someone; `ended`, cancelled above all; `unknown`, if it does not
# answer. While a job ends its state is COMPLETING, whatever it will be then.
fate() {
    local line restarts
    line=$(ask_slurm) || { echo unknown; return; }
    restarts=$(field Restarts "$line")
    [[ $restarts =~ ^[0-9]+$ ]] || { echo unknown; return; } # bash would run what it finds in an arithmetic expression
    if ((restarts > ${SLURM_RESTART_COUNT:-0})); then
        echo requeued
        return
    fi
    case "$(field JobState "$line") $(field Reason "$line")" in
    RUNNING* | SIGNALING* | STOPPED* | SUSPENDED* | RESIZING* | "COMPLETING TimeLimit" | TIMEOUT*) echo open ;;
    *) echo ended ;;
    esac
}

# ---- an attempt ----

# Its folder, and what every rank is told besides. Ends the script if the run is complete: Slurm 24.11 starts a job that was
# preempted once more after it has succeeded.
begin_attempt() {
    local hosts line
    [[ -e $HETSTEP_RUN_DIR/done.json ]] && exit 0
    line=$(ask_slurm) || { echo "slurmctld does not answer: when this job ends is not known" >&2; exit 1; }
    line=$(field EndTime "$line")
    export HETSTEP_END_TIME=
    [[ $line == [0-9]* ]] && { HETSTEP_END_TIME=$(date -d "$line" +%s) || exit 1; } # Unknown: there is no limit
    # SLURM_JOB_NODELIST is merged over the components and sorted: rank 0 need not be on its first host.
    hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}") || exit 1
    export HETSTEP_MASTER_ADDR=${hosts%%$'\n'*}
    attempt=$HETSTEP_RUN_DIR/attempts/$HETSTEP_ATTEMPT
    # Readers see `started` whole or not at all. `signals` is there before rank 0 is, and only grows: see tell_ranks.
    mkdir -p "$attempt" && : >"$attempt/signals" && date +%s.%N >"$attempt/.started" &&
        mv "$attempt/.started" "$attempt/started" || exit 1
    export HETSTEP_SIGNALS=$attempt/signals
}

# SIGTERM or SIGUSR2, which rank 0 takes as if it had come to itself; see pipeline/signals.py. The file is appended to in place:
# whoever opens it afterwards on another node sees that, over NFS too, which may hide a new file for a minute. Before there are
# ranks it does nothing.
tell_ranks() {
    [[ ${attempt:-} ]] || return 0
    echo "$1" >>"$attempt/signals" || echo "hetstep: the ranks cannot be told of $1" >&2
}

# This script may run on beside the next start of its job, if Slurm has given up its node. Job and steps have the same ids then,
# so a signal that goes by id is sent only as long as the job is this one's; else Slurm has seen to it.

# PID ...: of sruns. Told to end, they have their steps killed, by id.
kill_steps() { [[ $(fate) == open ]] && kill -TERM "$@" || kill -KILL "$@"; }

# Waits for all steps; returns the status of the first that failed. Then the others are told to end, and have STEP_PATIENCE_S to
# say what they know of it.
wait_for_steps() {
    local status=0 ended pid running timer=
    while ((${#steps[@]})); do
        wait -n # for a step, the timer or a signal
        running=" $(echo $(jobs -pr)) "
        for pid in "${!steps[@]}"; do
            [[ $running == *" $pid "* ]] && continue
            wait "$pid"
            ended=$?
            cat "$attempt/srun-${steps[$pid]% *}.out"
            # Where a node cannot make the container, srun ends with 0.
            ((ended)) || [[ -e $attempt/rank$(printf %05d "${steps[$pid]#* }").log ]] || ended=1
            if ((ended)); then
                echo "hetstep: the ${steps[$pid]% *} component failed; task 0 of its step is rank ${steps[$pid]#* }"
                if ((!status)); then
                    status=$ended
                    echo "${steps[$pid]}" >"$attempt/failed_step"
                    tell_ranks SIGTERM
                    sleep $STEP_PATIENCE_S &
                    timer=$!
                    running+="$timer "
                fi
            fi
            unset "steps[$pid]"
        done
        if [[ $timer && $running != *" $timer "* ]]; then
            ((${#steps[@]})) && kill_steps "${!steps[@]}"
            timer=
        fi
    done
    [[ $timer ]] && kill "$timer"
    return "$status"
}

# The same; sets `status`. What follows is safe from the signals that end a job.
end_attempt() {
    wait_for_steps
    status=$?
    trap '' TERM USR2
}

# ---- what follows ----

# Leaves the verdict where verdict.sh would.
tell() { echo "$1" | tee "$attempt/verdict"; }

# Ends the script, after the job has been requeued if that is the verdict.
finish_job() {
    case $(fate) in
    open)
        verdict "$HETSTEP_RUN_DIR" "$HETSTEP_ATTEMPT" "$status" "$max_restarts" "$requeue"
        status=$?
        ((status == 75)) || exit "$status"
        find_bad_nodes
        requeue_job
        ;;
    requeued)
        [[ -e $attempt/requeue ]] && tell "requeue: $(<"$attempt/requeue")"
        find_bad_nodes
        ;;
    ended)
        verdict "$HETSTEP_RUN_DIR" "$HETSTEP_ATTEMPT" "$status" 0 false >/dev/null && exit 0 # it was done before
        tell "stop: Slurm has ended the job"
        exit $((status ? status : 1))
        ;;
    *)
        tell "stop: slurmctld does not answer, so the job cannot be requeued"
        exit 1
        ;;
    esac
    avoid_bad_nodes
    exit 0
}

# The whole job, by its leading component. Never one that was cancelled a moment ago: Slurm would start it again.
requeue_job() {
    local error
    for _ in {1..5}; do
        [[ $(fate) == open ]] || break
        error=$(timeout 30 scontrol requeue "$SLURM_JOB_ID" 2>&1) && return
        sleep 5
    done
    [[ $(fate) == requeued ]] && return
    tell "stop: the job cannot be requeued: ${error:-Slurm has ended it}"
    exit 1
}

# The nodes that failed the checks of any start of this job are not taken again, by none of its components. Slurm takes this
# from a job that is pending, so it comes after the requeue; the next start is some time off. But Slurm kills this script KillWait
# after the requeue, so what is to be asked is asked before.
find_bad_nodes() {
    local before
    bad_nodes=$(cat "$HETSTEP_RUN_DIR/attempts/$SLURM_JOB_ID"-*/bad_nodes 2>/dev/null | sed 's/: .*//' | sort -u | paste -sd ,)
    [[ $bad_nodes ]] || return
    before=$(field ExcNodeList "$(ask_slurm)")
    [[ $before == "(null)" ]] || bad_nodes=$before,$bad_nodes
    job_ids=$(timeout 30 scontrol show job -o "$SLURM_JOB_ID" | grep -o '^JobId=[0-9]*' | cut -d = -f 2)
}

# timeout(1) would end at the SIGTERM that comes with the requeue. KillWait bounds the update: Slurm kills this script then.
avoid_bad_nodes() {
    local id updates=()
    [[ $bad_nodes ]] || return
    for id in $job_ids; do
        scontrol update "JobId=$id" "ExcNodeList=$bad_nodes" && echo "job $id will not run on $bad_nodes" &
        updates+=($!)
    done
    wait "${updates[@]}"
}
