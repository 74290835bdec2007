# Functions that every batch script calls before and after its steps. slurm.py copies this text into each batch script, and
# verdict.sh as the function `verdict`, so that later changes of the code do not affect a submitted job. The caller sets
# HETSTEP_RUN_DIR, _JOB_ID and _ATTEMPT; `max_restarts` and `requeue` (true, false), as verdict.sh takes them; and, between
# begin_attempt and end_attempt, `steps`: process id of an srun -> COMPONENT FIRST_RANK.
#
# Slurm sends a signal that asks the ranks to save and exit only to this script (--signal=B:USR2@..., scancel --batch), which
# informs rank 0 through a file. If pyxis mounts an image with squashfuse, a signal to a step ends squashfuse, and with it the
# root file system of the step's ranks. So the script sends no signal to a step whose ranks still work.
# When Slurm ends a job, it signals all processes. SIGTERM must not end the script before its steps, whose ranks may save then:
# both share the time of KillWait.

ANSWER_S=300       # how long to wait for slurmctld before a decision without it
STEP_PATIENCE_S=15 # how long the other steps may take to end by themselves after one has failed

# ---- queries to Slurm ----

# Print the leading component's line of `scontrol show job`, with times in the standard format. Fails if slurmctld does not
# answer within ANSWER_S.
ask_slurm() {
    local deadline=$((SECONDS + ANSWER_S))
    until SLURM_TIME_FORMAT=standard timeout 30 scontrol show job -o "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID "; do
        ((SECONDS < deadline)) || return 1
        sleep 5
    done
}

# field KEY LINE: print the value of a key. The first match counts, because lines of newer Slurm end with free text.
field() { [[ " $2" =~ \ $1=([^\ ]*) ]] && echo "${BASH_REMATCH[1]}"; }

# Print what Slurm has decided about the job: `open`, nothing yet, or its time limit, after which Slurm does not requeue it;
# `requeued`, by Slurm (preemption, a lost node) or a user; `ended`, mostly cancelled; `unknown`, if Slurm does not answer.
# The state of a job that is ending is COMPLETING, whatever its final state will be.
fate() {
    local line restarts
    line=$(ask_slurm) || { echo unknown; return; }
    restarts=$(field Restarts "$line")
    [[ $restarts =~ ^[0-9]+$ ]] || { echo unknown; return; } # bash would run code inside an arithmetic expression
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

# Create the attempt's folder, and export the variables of all ranks. Ends the script if the run is complete, because Slurm 24.11
# may start a preempted job once more after it has succeeded.
begin_attempt() {
    local hosts line
    [[ -e $HETSTEP_RUN_DIR/done.json ]] && exit 0
    line=$(ask_slurm) || { echo "slurmctld does not answer, so the end time of this job is unknown" >&2; exit 1; }
    line=$(field EndTime "$line")
    export HETSTEP_END_TIME=
    [[ $line == [0-9]* ]] && { HETSTEP_END_TIME=$(date -d "$line" +%s) || exit 1; } # `Unknown` means no limit
    # SLURM_JOB_NODELIST merges and sorts the nodes of all components, so its first host may not be rank 0's.
    hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}") || exit 1
    export HETSTEP_MASTER_ADDR=${hosts%%$'\n'*}
    attempt=$HETSTEP_RUN_DIR/attempts/$HETSTEP_ATTEMPT
    # `started` appears atomically. `signals` exists before rank 0 starts, and only grows: see tell_ranks.
    mkdir -p "$attempt" && : >"$attempt/signals" && date +%s.%N >"$attempt/.started" &&
        mv "$attempt/.started" "$attempt/started" || exit 1
    export HETSTEP_SIGNALS=$attempt/signals
}

# tell_ranks SIGTERM|SIGUSR2: pass a signal to rank 0, which handles it like its own; see pipeline/job/signals.py. The signal is
# appended to an existing file, because NFS may hide a new file from other nodes for a minute. Does nothing before the ranks start.
tell_ranks() {
    [[ ${attempt:-} ]] || return 0
    echo "$1" >>"$attempt/signals" || echo "hetstep: cannot pass $1 to the ranks" >&2
}

# If Slurm has given up this node, this script may still run while the next start of its job runs elsewhere, with the same ids of
# job and steps. So a signal by id is sent only while the job belongs to this start; otherwise Slurm has ended the steps.

# kill_steps PID ...: end sruns. On SIGTERM an srun kills its step by id.
kill_steps() { [[ $(fate) == open ]] && kill -TERM "$@" || kill -KILL "$@"; }

# Wait for all steps, and return the status of the first one that failed. After a failure the other steps are asked to end, and
# have STEP_PATIENCE_S to write what they know about it.
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
            # srun exits with 0 if a node cannot create the container.
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

# Wait for the steps, and set `status`. Afterwards the signals that end a job are ignored.
end_attempt() {
    wait_for_steps
    status=$?
    trap '' TERM USR2
}

# ---- verdict and requeue ----

# Print the verdict, and write it where verdict.sh does.
tell() { echo "$1" | tee "$attempt/verdict"; }

# Requeue the job if the verdict requests it, and end the script.
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
        verdict "$HETSTEP_RUN_DIR" "$HETSTEP_ATTEMPT" "$status" 0 false >/dev/null && exit 0 # the run was complete before
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

# Requeue the whole job by its leading component; never a job that was just cancelled, because Slurm would start it again.
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

# Find the nodes that failed the checks in any start of this job, to exclude them for all its components. Slurm accepts an
# exclusion only for a pending job, so it follows the requeue, before the next start. Slurm kills this script KillWait after the
# requeue, so all queries come before it.
find_bad_nodes() {
    local before
    bad_nodes=$(cat "$HETSTEP_RUN_DIR/attempts/$SLURM_JOB_ID"-*/bad_nodes 2>/dev/null | sed 's/: .*//' | sort -u | paste -sd ,)
    [[ $bad_nodes ]] || return
    before=$(field ExcNodeList "$(ask_slurm)")
    [[ $before == "(null)" ]] || bad_nodes=$before,$bad_nodes
    job_ids=$(timeout 30 scontrol show job -o "$SLURM_JOB_ID" | grep -o '^JobId=[0-9]*' | cut -d = -f 2)
}

# Exclude the bad nodes for one component. A busy controller may refuse the first update.
exclude_bad_nodes() {
    for _ in {1..3}; do
        scontrol update "JobId=$1" "ExcNodeList=$bad_nodes" && echo "job $1 will not run on $bad_nodes" && return
        sleep 1
    done
}

# Exclude the bad nodes for all components. No timeout(1): it would end at the SIGTERM of the requeue. KillWait bounds the
# updates instead.
avoid_bad_nodes() {
    local id updates=()
    [[ $bad_nodes ]] || return
    for id in $job_ids; do
        exclude_bad_nodes "$id" &
        updates+=($!)
    done
    wait "${updates[@]}"
}
