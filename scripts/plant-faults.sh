#!/bin/bash
# Plants every known fault, one at a time, and shows that the test named beside it fails.
#
#   scripts/plant-faults.sh [PART...]     PART: ownership, site, wire, qemu, agent, disks, vmproc, product; all without one
#
# A safety test counts once it has been seen to fail. Builds with planted faults go to target/plants, so that they never
# meet the product's; the real-QEMU tests, whose VM process always has the switches, run from where they are built.
# Ends with "N passed, M failed": a plant that no test notices is a failure.
set -u
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0
parts="${*:-ownership site wire qemu agent disks vmproc product}"
logs=target/plants/logs
mkdir -p "$logs"
caught=0
missed=0

# verdict PART PLANT TEST STATUS: status 0 means that the test passed in spite of the plant.
verdict() {
    local word=caught
    if [ "$4" -eq 0 ]; then
        word=MISSED
        missed=$((missed + 1))
    else
        caught=$((caught + 1))
    fi
    printf '%-10s %-34s -> %-66s %s\n' "$1" "$2" "$3" "$word"
}

# The test must pass without the plant, else its failure with it shows nothing.
unplanted() {
    if [ "$3" -ne 0 ]; then
        printf '%-10s %-34s -> %-66s %s\n' "$1" "(nothing planted)" "$2" "FAILS ANYWAY"
        missed=$((missed + 1))
        return 1
    fi
}

# Only a test that ran and failed counts: not one that was not found or did not build.
ran_and_failed() {
    grep -q '^test result: FAILED' "$1" && return 1
    grep -q '^skipped: ' "$1" && { echo "the test was skipped: see $1" >&2; exit 2; }
    grep -q '^test result: ok. [1-9]' "$1" && return 0
    echo "the test did not run: see $1" >&2
    exit 2
}

ownership() {
    cargo build -q --release -p godwit-sim --features planted-faults --target-dir target/plants || exit 2
    local sim=target/plants/release/godwit-sim plant
    "$sim" --seeds 2000 >"$logs/sim-none.log" 2>&1
    unplanted ownership "godwit-sim --seeds 2000" $? || return
    for plant in $("$sim" --plants); do
        timeout 300 "$sim" --seeds 20000 --plant "$plant" >"$logs/sim-$plant.log" 2>&1
        local status=$?
        # 1 is a broken invariant; anything else is no verdict.
        if [ $status -gt 1 ]; then
            echo "the simulator did not finish: see $logs/sim-$plant.log" >&2
            exit 2
        fi
        verdict ownership "$plant" "simulator, $(grep -o '^seed [0-9]*' "$logs/sim-$plant.log" | head -1)" $status
    done
    ownership_case grant-without-survey core::surveys::a_grant_is_taken_only_at_the_level_of_the_last_survey
    ownership_case old-permission-taken core::surveys::a_survey_voids_the_permissions_before_it_at_both_ends
    ownership_case boots-without-asking core::nothing_boots_by_itself
    ownership_case successor-leaves-gave-running core::a_successor_stops_a_guest_that_was_given_away
    ownership_case yields-to-anybody lib::unrelated_tests::an_unrelated_host_moves_nothing
    ownership_case anybody-moves-generations lib::unrelated_tests::an_unrelated_host_moves_nothing
    ownership_case peers-reach-all lib::unrelated_tests::asked_again_and_again_a_host_stays_within_its_controllers_reach
}

# ownership_case PLANT FILE::TEST: what the simulator of one VM does not have. FILE is lib for tests inside the crate.
ownership_case() {
    local log="$logs/ownership-$1.log" file=${2%%::*}
    local place=(--test "$file")
    [ "$file" = lib ] && place=(--lib)
    GODWIT_PLANT=$1 cargo test -q --release -p godwit-ownership --features planted-faults --target-dir target/plants \
        "${place[@]}" -- "${2#*::}" --exact >"$log" 2>&1
    ran_and_failed "$log"
    verdict ownership "$1" "$2" $?
}

site() {
    cargo build -q --release -p godwit-sim --features planted-faults --target-dir target/plants || exit 2
    local sim=target/plants/release/godwit-sim plant
    "$sim" --site --seeds 2000 >"$logs/site-none.log" 2>&1
    unplanted site "godwit-sim --site --seeds 2000" $? || return
    for plant in $("$sim" --site --plants); do
        timeout 300 "$sim" --site --seeds 40000 --plant "$plant" >"$logs/site-$plant.log" 2>&1
        local status=$?
        if [ $status -gt 1 ]; then
            echo "the simulator did not finish: see $logs/site-$plant.log" >&2
            exit 2
        fi
        verdict site "$plant" "site simulator, $(grep -o '^seed [0-9]*' "$logs/site-$plant.log" | head -1)" $status
    done
    site_case old-no-counts a_no_from_before_a_host_was_named_again_does_not_take_it_out
    site_case old-answer-boots an_answer_that_is_older_than_what_the_host_knows_boots_nothing
    site_case restored-controller-goes-on a_controller_that_hears_a_later_word_than_its_own_grants_nothing
    site_case hears-neighbours-first a_host_hears_its_controller_out_before_its_neighbours_let_it_boot
    site_case first-answer-boots one_hosts_answer_boots_nothing_while_another_may_still_speak_against_it_or_has_before
    site_case persons-word-unheard a_persons_word_at_a_host_does_not_outweigh_what_others_know
    site_case old-fence-counts a_restored_database_does_not_believe_that_a_host_is_off
    site_case loses-unwritten what_could_not_be_written_is_due_again
    site_case grants-before-hearing a_controller_that_was_just_started_grants_nothing_before_it_asked_every_host
    site_case believes-any-generation a_gift_at_the_end_of_all_generations_binds_no_host
    site_case misses-went-back a_host_that_forgot_a_word_which_it_acknowledged_is_an_old_copy
    site_case former-machine-is-the-host a_restored_controller_gives_no_name_back_to_a_former_machine
}

site_case() {
    local log="$logs/site-$1.log"
    GODWIT_PLANT=$1 cargo test -q --release -p godwit-site --features planted-faults --target-dir target/plants \
        --test plants -- "$2" --exact >"$log" 2>&1
    ran_and_failed "$log"
    verdict site "$1" "plants::$2" $?
}

wire_case() {
    local log="$logs/wire-$1.log"
    GODWIT_PLANT=$1 cargo test -q --release -p godwit-wire --features planted-faults --target-dir target/plants --lib \
        -- "$2" --exact >"$log" 2>&1
    ran_and_failed "$log"
    verdict wire "$1" "$2" $?
}

wire() {
    wire_case counter-unchecked tests::a_replayed_record_is_refused_and_ends_the_stream
    wire_case length-unchecked tests::a_huge_length_is_refused_before_anything_is_read
    wire_case tag-unchecked tests::every_flipped_bit_of_a_record_is_refused
}

qemu_unit() {
    local log="$logs/qemu-$1.log"
    GODWIT_PLANT=$1 cargo test -q --release -p godwit-qemu --features planted-faults --target-dir target/plants --lib \
        -- "$2" --exact >"$log" 2>&1
    ran_and_failed "$log"
    verdict qemu "$1" "$2" $?
}

qemu() {
    qemu_unit takes-emfile-for-gone process::tests::a_live_process_is_not_gone_because_no_descriptor_is_left
    qemu_unit opened-unlooked disk::tests::what_is_no_image_is_not_even_opened_whatever_way_leads_there
}

agent_unit() {
    local log="$logs/agent-$1.log"
    GODWIT_PLANT=$1 cargo test -q --release -p godwit-agent --features faults --target-dir target/plants --lib \
        -- "$2" --exact >"$log" 2>&1
    ran_and_failed "$log"
    verdict agent "$1" "$2" $?
}

agent() {
    agent_unit boots-without-asking boot::tests::a_host_whose_site_is_silent_boots_nothing_and_says_what_it_waits_for
    agent_unit old-word-accepted site::tests::an_old_controller_is_refused_and_a_new_word_is_durable_before_its_command_is_done
}

# e2e_case PART PLANT FILE TEST
e2e_case() {
    local log="$logs/$1-$2.log"
    GODWIT_PLANT=$2 timeout 300 cargo test -q --release -p godwit-e2e --test "$3" -- "$4" --exact --test-threads=1 \
        >"$log" 2>&1
    ran_and_failed "$log"
    verdict "$1" "$2" "$3::$4" $?
}

vmproc_case() {
    e2e_case vmproc "$@"
}

vmproc_unit() {
    local log="$logs/vmproc-$1.log"
    GODWIT_PLANT=$1 cargo test -q --release -p godwit-vmproc --features faults --target-dir target/plants --lib \
        -- "$2" --exact >"$log" 2>&1
    ran_and_failed "$log"
    verdict vmproc "$1" "$2" $?
}

# Planted in what carries the VM process's pages.
streams_unit() {
    local log="$logs/streams-$1.log"
    GODWIT_PLANT=$1 cargo test -q --release -p godwit-streams --features faults --target-dir target/plants --lib \
        -- "$2" --exact >"$log" 2>&1
    ran_and_failed "$log"
    verdict vmproc "$1" "$2" $?
}

# core_model CRATE: the model test plants each fault of that core by itself, and fails where one is not found.
core_model() {
    local log="$logs/disks-$1.log" plant
    cargo test -q --release -p "godwit-$1" --features planted-faults --target-dir target/plants --test model \
        -- each_planted_fault_is_found --exact --nocapture >"$log" 2>&1
    for plant in $(grep -o '^[A-Za-z]*: seed' "$log" | cut -d : -f 1); do
        grep -q "^$plant: seed None" "$log"
        verdict disks "$plant" "model::each_planted_fault_is_found" $?
    done
    grep -q '^test result: ok. 1 ' "$log" || { echo "the model test did not end well: see $log" >&2; exit 2; }
}

# disk_case CRATE PLANT FILE TEST
disk_case() {
    local log="$logs/disks-$2.log"
    GODWIT_PLANT=$2 timeout 300 cargo test -q --release -p "godwit-$1" --features planted-faults \
        --target-dir target/plants --test "$3" -- "$4" --exact >"$log" 2>&1
    ran_and_failed "$log"
    verdict disks "$2" "$3::$4" $?
}

disks() {
    core_model mirror
    core_model tracking
    core_model redo
    core_model delta
    for fault in revert-over-former-layer layer-of-two-written snapshot-layer-unneeded moved-over-own-image common-layer-written disk-left-elsewhere; do
        disk_case snapshots $fault model a_disk_and_its_snapshots_keep_their_content_whatever_is_taken_forgotten_and_tidied
    done
    disk_case vhost memory-read-twice another_image a_write_that_its_guest_changes_meanwhile_is_the_same_on_both_images
    disk_case vhost used-ring-not-marked disk a_tracker_is_told_of_everything_that_a_disk_writes_into_the_guest_and_of_nothing_else
    disk_case vhost data-not-marked disk a_tracker_is_told_of_everything_that_a_disk_writes_into_the_guest_and_of_nothing_else
    disk_case blockio grain-not-filled tops what_is_written_while_a_top_is_copied_is_read_on_both_disks
    disk_case blockio merge-forgets-a-piece deltas a_chain_of_three_is_read_as_one_image_by_us_and_by_qemu_and_merged_into_its_base
    disk_case blockio answered-before-destination confirmed a_write_is_answered_once_the_destination_has_it_too
    disk_case blockio flushed-at-source-alone confirmed a_flush_of_equal_sides_is_answered_once_both_have_done_it_and_so_is_a_durable_write
    disk_case vhost parked-request-lost full a_write_that_waits_for_room_survives_a_stop_though_a_later_request_was_answered
    cargo build -q --release -p godwit-e2e --tests --bins || exit 2
    e2e_case disks flush-acknowledged-early disk_power_cuts an_acknowledged_flush_survives_thirty_power_cuts
    e2e_case disks flush-acknowledged-early device_power_cuts an_acknowledged_flush_of_a_disk_on_a_labelled_device_survives_power_cuts
    e2e_case disks length-not-durable disk_power_cuts the_length_of_a_disk_that_was_made_larger_survives_a_power_cut
    e2e_case disks lock-on-another-descriptor disk_lock an_image_is_not_free_before_the_last_write_of_a_killed_process_has_ended
    e2e_case disks image-opened-before-permit disks_move a_vm_whose_disk_both_hosts_have_moves_its_memory_alone
    e2e_case disks ready-before-flush disk_deaths a_destination_whose_power_fails_before_its_guest_runs_has_the_whole_disk
    e2e_case disks renewal-hands-no-disk disk_renewed a_vm_process_is_renewed_ten_times_and_qemu_stays_connected_to_its_disk
    e2e_case disks unsynchronised-switch disks_move a_vm_moves_with_its_disk_to_a_host_that_has_nothing_of_it_and_back
}

vmproc() {
    cargo build -q --release -p godwit-e2e --tests --bins || exit 2
    # Left out or too early in the data path.
    vmproc_case last-pages-not-sent moves a_running_guest_moves_once
    vmproc_case final-scan-skipped moves a_guest_that_writes_rarely_loses_nothing
    vmproc_case tracking-after-first-read moves a_guest_that_writes_rarely_loses_nothing
    vmproc_case barrier-not-awaited moves a_destination_that_is_slow_to_apply_loses_nothing
    streams_unit zero-pages-not-cleared destination::memory::tests::a_page_that_comes_as_zero_is_cleared
    streams_unit awaited-flush-skipped source::changes::tests::what_a_flush_on_a_near_link_covers_survives_a_power_cut_of_the_destination
    vmproc_unit receivers-outlive-load destination::driver::tests::a_source_that_has_sent_its_last_pages_has_no_way_left_into_guest_memory
    vmproc_case lost-channel-not-put-back links a_link_cut_in_precopy_is_made_again_and_nothing_is_lost
    vmproc_unit any-shutdown-is-a-wish hypervisor::tests::only_a_guest_s_own_shutdown_is_its_wish
    # The right to run.
    vmproc_unit unknown-hypervisor-ended adoption::tests::a_hypervisor_whose_identity_was_wiped_is_taken_over
    vmproc_case permit-ignored guest_events nobody_runs_before_the_gift_is_durable
    vmproc_case cleanup-ready-on-link-loss links a_link_cut_after_the_permit_is_settled_through_the_agents
    # The ownership core's own faults, seen from outside of real processes.
    vmproc_case run-before-holds guest_events nobody_runs_before_the_holding_is_durable
    vmproc_case last-pages-skipped moves a_running_guest_moves_once
    vmproc_case resume-on-timeout-after-gave links a_link_cut_after_the_permit_is_settled_through_the_agents
    vmproc_case permit-twice requests cancel_after_the_permit_is_refused
    vmproc_case variables-not-sent uefi what_came_is_there_for_a_guest_that_is_booted_anew
    vmproc_case image-swapped disks another_file_in_the_place_of_an_image_is_not_served_to_a_guest_that_runs
    vmproc_case image-not-judged disk_holder an_image_that_another_host_took_later_is_not_opened
    vmproc_case larger-unjudged disk_holder an_image_that_another_disk_or_host_had_last_is_not_made_larger
    vmproc_unit removed-by-path disks::entry::tests::what_was_looked_at_is_removed_though_its_directory_was_exchanged_for_a_link
    vmproc_case made-not-compared disk_in_place a_file_that_somebody_puts_where_a_new_image_was_made_is_not_written
    vmproc_case half-made-opened disk_on_device a_vm_whose_device_says_something_else_is_not_started_with_it
    vmproc_case label-not-missed disk_on_device a_vm_whose_device_says_something_else_is_not_started_with_it
    vmproc_case device-not-looked-at disk_on_device a_device_on_which_anything_is_takes_no_disk_and_is_not_changed
    vmproc_case device-holes-skipped disk_on_device a_disk_comes_to_a_device_and_leaves_it_and_comes_again_and_its_guest_loses_nothing
    vmproc_case device-not-zeroed disk_to_device a_vm_comes_to_a_device_of_another_host_and_goes_back_and_loses_nothing
    vmproc_unit any-device-freed disks::labelled::tests::only_the_part_or_the_disk_that_is_noted_is_let_go
    vmproc_case switch-before-record disk_in_place a_process_that_dies_while_it_moves_a_disk_leaves_one_image_which_is_the_right_one
    vmproc_case last-log-unsent disk_redo_away a_vm_moves_with_its_disk_by_redo_logs_to_another_host_and_back
    vmproc_case room-not-awaited disk_full a_guest_whose_disk_is_full_is_paused_and_goes_on_by_itself_when_there_is_room
    vmproc_case room-wait-not-on-record disk_full a_guest_that_waits_for_room_when_its_host_loses_power_is_booted_and_one_that_a_person_paused_is_not
    vmproc_case forgotten-disk-left disks a_guest_that_was_let_run_while_its_disk_was_away_goes_on_where_it_was
}

# The whole product with an ordinary VM. What is built together has the features of all: so the program has the switches, too.
product() {
    cargo build -q --release -p godwit -p godwit-e2e --bins --tests --target-dir target/plants || exit 2
    mkdir -p target/debian
    ln -sfn ../debian target/plants/debian
    product_case "" || return
    product_case last-pages-not-sent
}

# product_case PLANT: with none the test must pass.
product_case() {
    local log="$logs/product-${1:-none}.log" test=a_debian_keeps_every_commit_wherever_its_disk_goes
    GODWIT_PLANT=$1 timeout 1500 cargo test -q --release -p godwit -p godwit-e2e --target-dir target/plants \
        --test stack_debian -- $test --exact >"$log" 2>&1
    ran_and_failed "$log"
    local status=$?
    if [ -z "$1" ]; then
        unplanted product "stack_debian::$test" $status
        return
    fi
    verdict product "$1" "stack_debian::$test" $status
}

for part in $parts; do
    case $part in
        ownership | site | wire | qemu | agent | disks | vmproc | product) "$part" ;;
        *) echo "unknown part '$part': ownership, site, wire, qemu, agent, disks, vmproc or product" >&2; exit 2 ;;
    esac
done
echo "$caught passed, $missed failed"
[ "$missed" -eq 0 ]
