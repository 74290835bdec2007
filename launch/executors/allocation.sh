# The controller of a run inside an salloc; allocation.py puts this text behind the functions of slurm.py's scripts.
# It starts the ranks, and again after a crash, if the verdict is so. SIGTERM ends it and them; SIGUSR2 asks them to save and
# leave. In the end it leaves its state in submitit/<its process id>_end.json, as the local executor's controller does.

step_name=hetstep-$SLURM_JOB_ID-$$
exec >>"$submitit/$$_0_log.out" 2>&1
state=FAILED reason='the controller came to an early end'
on_term='state=CANCELLED reason="by a signal"; exit 1'
trap "$on_term" TERM INT
trap 'tell_ranks SIGUSR2' USR2
trap leave EXIT

end_steps() {
    ((${#steps[@]})) && kill -TERM "${!steps[@]}" 2>/dev/null # srun kills its tasks then
    wait
    steps=()
}

leave() {
    trap '' TERM INT USR2
    trap - EXIT
    end_steps
    reason=${reason//[\"\\$'\n']/ }
    printf '{"state": "%s", "reason": "%s"}\n' "$state" "$reason" >"$submitit/$$_end.new"
    mv -f "$submitit/$$_end.new" "$submitit/$$_end.json"
    [[ $state == COMPLETED ]]
    exit
}

for ((restart = 0; ; restart++)); do
    start
    wait_for_steps
    status=$?
    reason=$(verdict "$HETSTEP_RUN_DIR" "$HETSTEP_ATTEMPT" "$status" "$max_restarts" "$requeue")
    judged=$?
    echo "hetstep: $HETSTEP_ATTEMPT: $reason"
    ((judged == 0)) && state=COMPLETED reason='' && break
    ((judged == 75)) || break
    if [[ -e $attempt/requeue ]]; then # left on purpose: there is no more time, or someone asked for it
        state=STOPPED reason="${reason#requeue: }; the same command in another allocation goes on"
        break
    fi
done
