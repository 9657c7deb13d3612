//! The link between the hosts, cut, stalled and healed at every stage.

use godwit_e2e::guests::{counter_vm, wait_passes};
use godwit_e2e::pair::{Options, Pair};
use godwit_e2e::relay::Mode;
use godwit_testkit::guest::counter::CounterSpec;
use godwit_types::MigrationId;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::Outcome;
use godwit_types::vm::{Accelerator, VmState};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(30);

/// A guest that writes a page now and then: what is lost once is not written again soon, so that it shows.
fn slow_guest() -> CounterSpec {
    CounterSpec::flat(48).slowed(20_000)
}

fn relayed() -> Options {
    Options {
        relayed: true,
        ..Options::default()
    }
}

/// A pair whose migration over the relay waits at a point.
fn held(at_source: bool, point: &'static str) -> anyhow::Result<(Pair, MigrationId)> {
    held_with(&slow_guest(), at_source, point)
}

fn held_with(
    guest: &CounterSpec,
    at_source: bool,
    point: &'static str,
) -> anyhow::Result<(Pair, MigrationId)> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.patience(Duration::from_millis(500));
    let host = if at_source { &pair.a } else { &pair.b };
    host.arm(point, "hold");
    pair.boot(&counter_vm(pair.dir(), guest, 64)?)?;
    // All pages are prepared, and so hold something to lose.
    wait_passes(&pair.a.ram_file()?, 0, LONG)?;
    let id = pair.begin(&pair.a, &pair.b, &relayed())?;
    host.wait_fault(LONG)?;
    Ok((pair, id))
}

/// Waits until the source says that something is wrong; it has noticed then.
fn wait_noticed(pair: &Pair, id: &MigrationId, otherwise: &'static str) -> anyhow::Result<()> {
    let deadline = Instant::now() + LONG;
    while pair.a.report(id)?.reason.is_none() {
        anyhow::ensure!(Instant::now() < deadline, otherwise);
        std::thread::sleep(Duration::from_millis(5)); // how often it looks
    }
    Ok(())
}

#[test]
fn a_link_cut_in_precopy_is_made_again_and_nothing_is_lost() -> anyhow::Result<()> {
    // A pass takes seconds: what the cut loses is not written anew before it is looked at.
    let guest = CounterSpec::flat(24).slowed(300_000);
    let (pair, id) = held_with(&guest, false, "destination.receiving")?;
    pair.link(Mode::Cut);
    pair.b.release()?;
    // The source has noticed once it says so.
    wait_noticed(&pair, &id, "the source does not notice the cut")?;
    pair.link(Mode::Open);
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name, "it did not complete");
    Ok(())
}

#[test]
fn a_link_that_stalls_in_precopy_is_made_again() -> anyhow::Result<()> {
    let (pair, id) = held(false, "destination.receiving")?;
    pair.link(Mode::Stalled);
    pair.b.release()?;
    wait_noticed(&pair, &id, "the source does not notice the silence")?;
    pair.link(Mode::Open);
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name, "it did not complete");
    Ok(())
}

/// Cut or silent while the last pages are on their way: the guest runs on at a at once, precopy goes on, it completes.
fn switchover_disturbed(mode: Mode) -> anyhow::Result<()> {
    let (pair, id) = held(true, "source.stopped")?;
    pair.link(mode);
    let cut = Instant::now();
    pair.a.release()?;
    let ram = pair.a.ram_file()?;
    wait_noticed(&pair, &id, "the source does not resume")?;
    println!("the guest stood still for {:?}", cut.elapsed());
    anyhow::ensure!(pair.a.state()? == VmState::Running);
    anyhow::ensure!(pair.stepping(&ram)?, "the guest does not run on at a");
    pair.link(Mode::Open);
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name, "it did not complete");
    Ok(())
}

#[test]
fn a_link_cut_in_the_switchover_resumes_the_source_and_precopy_goes_on() -> anyhow::Result<()> {
    switchover_disturbed(Mode::Cut)
}

#[test]
fn a_link_silent_in_the_switchover_resumes_the_source_and_precopy_goes_on() -> anyhow::Result<()> {
    switchover_disturbed(Mode::Stalled)
}

#[test]
fn a_link_half_open_in_the_switchover_resumes_the_source() -> anyhow::Result<()> {
    switchover_disturbed(Mode::HalfOpen)
}

/// A destination that says nothing while device state is there, or on its way, is not waited for: the guest runs on at a.
/// QEMU loads once, and has not begun: the next switchover completes.
fn called_off_before_the_load(point: &'static str) -> anyhow::Result<()> {
    let (pair, id) = held(false, point)?;
    let ram = pair.a.ram_file()?;
    wait_noticed(&pair, &id, "the source does not resume")?;
    anyhow::ensure!(pair.stepping(&ram)?, "the guest does not run on at a");
    pair.b.release()?;
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name, "it did not complete");
    Ok(())
}

#[test]
fn a_switchover_called_off_while_device_state_comes_is_made_again() -> anyhow::Result<()> {
    called_off_before_the_load("destination.state-comes")
}

#[test]
fn a_switchover_called_off_when_device_state_has_come_is_made_again() -> anyhow::Result<()> {
    called_off_before_the_load("destination.state-whole")
}

#[test]
fn a_link_cut_while_device_state_is_loaded_ends_with_the_guest_at_the_source() -> anyhow::Result<()>
{
    let (pair, id) = held(false, "destination.loaded")?;
    pair.link(Mode::Cut);
    wait_noticed(&pair, &id, "the source does not resume")?;
    pair.b.release()?;
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.a.name);
    Ok(())
}

#[test]
fn a_link_cut_after_the_permit_is_settled_through_the_agents() -> anyhow::Result<()> {
    let (pair, id) = held(true, "journal.gave.after")?;
    pair.agents_connected.store(false, Ordering::SeqCst);
    pair.link(Mode::Cut);
    pair.a.release()?;
    pair.a.wait_state(VmState::InDoubt, LONG)?;
    pair.b.wait_state(VmState::InDoubt, LONG)?;
    anyhow::ensure!(pair.a.report(&id)?.outcome == Some(Outcome::InDoubt));
    let note = pair.a.vm()?.note.unwrap_or_default();
    anyhow::ensure!(note.contains("godwit vm resolve vm --run-on a"), "{note}");
    anyhow::ensure!(
        pair.moving_now()?.is_empty(),
        "somebody runs the guest in doubt"
    );
    pair.agents_connected.store(true, Ordering::SeqCst);
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(
        end.settled.owner.name == pair.b.name,
        "the destination, which was given the guest and had it loaded, did not take it"
    );
    Ok(())
}

#[test]
fn a_doubt_that_never_heals_ends_by_the_operators_word() -> anyhow::Result<()> {
    let (pair, id) = held(true, "journal.gave.after")?;
    pair.agents_connected.store(false, Ordering::SeqCst);
    pair.link(Mode::Cut);
    pair.a.release()?;
    pair.a.wait_state(VmState::InDoubt, LONG)?;
    // The operator fences b, and says so.
    pair.supervised.store(false, Ordering::SeqCst);
    pair.b.kill_process();
    godwit_e2e::host::kill_qemu_of(&pair.b.run_dir());
    let resolve = |fenced: &str| -> anyhow::Result<_> {
        pair.a.ask(&VmRequest::Resolve {
            run_here: true,
            confirm_fenced: Some(godwit_types::HostName::new(fenced)?),
        })
    };
    anyhow::ensure!(
        resolve("c").is_err(),
        "another host's fencing settles nothing"
    );
    resolve("b")?;
    pair.a.wait_state(VmState::Running, LONG)?;
    anyhow::ensure!(pair.stepping(&pair.a.ram_file()?)?);
    anyhow::ensure!(pair.a.report(&id)?.outcome == Some(Outcome::Failed));
    // b comes back and learns that its promise is void.
    pair.agents_connected.store(true, Ordering::SeqCst);
    pair.supervised.store(true, Ordering::SeqCst);
    pair.b.start_process()?;
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.a.name);
    Ok(())
}

#[test]
fn a_link_that_is_away_at_the_beginning_is_waited_for() -> anyhow::Result<()> {
    let (pair, id) = held(true, "source.setup")?;
    pair.link(Mode::Stalled);
    pair.a.release()?;
    wait_noticed(&pair, &id, "nothing is said of the link")?;
    let report = pair.a.report(&id)?;
    anyhow::ensure!(
        report.outcome.is_none()
            && report
                .reason
                .is_some_and(|why| why.starts_with("not connected after ")
                    && why.contains("trying for 60 s: host a cannot reach host b")
                    && why.contains("(tried from ")),
        "it is given up: {:?}",
        report.outcome
    );
    pair.link(Mode::Open);
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(
        end.settled.owner.name == pair.b.name,
        "the guest has not left a"
    );
    Ok(())
}
