# The controller of a run inside an salloc. allocation.py appends this text to the functions of slurm.py's scripts.
# It starts the ranks, and restarts them after a crash if the verdict requests it. SIGTERM ends the controller and the ranks.
# SIGUSR2 asks the ranks to save and exit. At its end it writes submitit/<process id>_end.json, as the local controller does.

step_name=hetstep-$SLURM_JOB_ID-$$
exec >>"$submitit/$$_0_log.out" 2>&1
state=FAILED reason='the controller ended early'
on_term='state=CANCELLED reason="by a signal"; exit 1'
trap "$on_term" TERM INT
trap 'tell_ranks SIGUSR2' USR2
trap leave EXIT

end_steps() {
    ((${#steps[@]})) && kill -TERM "${!steps[@]}" 2>/dev/null # srun then kills its tasks
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
    if [[ -e $attempt/requeue ]]; then # the ranks exited on purpose: no time is left, or a signal requested it
        state=STOPPED reason="${reason#requeue: }; the same command in another allocation continues it"
        break
    fi
done
