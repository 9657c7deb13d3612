//! Sources that a destination's driver must bear: late ones, and hostile ones.

use super::*;
use crate::testing::spec;
use godwit_guestmem::{PAGE_SIZE, RamFile};
use godwit_migrate::protocol::{PROTOCOL_VERSION, ToDestination, decode_to_source, encode};
use godwit_ownership::{PeerMessage, Reason};
use godwit_transport::{ConnectOptions, ControlReceiver, ControlSender, Patience, connect};
use godwit_types::MigrationId;
use godwit_types::migration::Side;
use godwit_wire::{ChannelId, PageRun, PageRuns};
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::{Sender, channel};

#[test]
fn a_cancel_that_a_lost_channel_overtook_is_heard() {
    let spec = spec();
    let arrivals = Arrivals::listen(&spec, &[[127, 0, 0, 1].into()], (0, 0)).unwrap();
    let (options, until) = (
        ConnectOptions::default(),
        Instant::now() + Duration::from_secs(60),
    );
    let to = arrivals.addresses[0];
    let made = connect(to, &options, &spec, ChannelId::control(0), until).unwrap();
    let (mut source, _hearing) = made.into_control().unwrap();
    let abort = PeerMessage::Abort {
        migration: MigrationId::new("m").unwrap(),
        reason: Some(Reason::clipped("enough")),
        cancelled: true,
        has_disks: false,
    };
    let said = [
        ToDestination::Ping { nonce: 1 },
        ToDestination::Peer {
            message: abort.clone(),
        },
    ];
    for message in &said {
        source.send(&encode(message), until).unwrap();
    }
    source.closer().close();
    let came = arrivals.connections.recv_timeout(Duration::from_secs(60));
    let (_sender, mut receiver) = came.unwrap().into_control().unwrap();
    let told = std::cell::RefCell::new(Vec::new());
    // Nothing is waited for, but here for the kernel.
    while told.borrow().is_empty() && Instant::now() < until {
        hear_rest(&mut receiver, 1, |message| told.borrow_mut().push(message));
    }
    assert_eq!(told.into_inner(), [abort]);
}

#[test]
fn a_source_that_comes_back_after_the_load_hears_that_it_is_too_late() {
    let spec = spec();
    let arrivals = Arrivals::listen(&spec, &[[127, 0, 0, 1].into()], (0, 0)).unwrap();
    let to = arrivals.addresses[0];
    let (commands, received) = channel();
    let waiting = std::thread::spawn(move || wait_for_end(&arrivals, None, &received));
    let until = Instant::now() + Duration::from_secs(60);
    for set in 1..3 {
        let options = ConnectOptions::default();
        let made = connect(to, &options, &spec, ChannelId::control(set), until).unwrap();
        let (_sender, mut receiver) = made.into_control().unwrap();
        let Ok(Incoming::Message(bytes)) = receiver.recv(until) else {
            panic!("it is not answered");
        };
        let heard = decode_to_source(&bytes, 1);
        assert!(matches!(heard, Ok(ToSource::Failed { .. })), "{heard:?}");
    }
    commands.send(Command::End).unwrap();
    assert!(matches!(waiting.join().unwrap(), Halt::Ended));
}

/// A driver without a hypervisor, guest memory of 4 MiB, and the file of that.
fn driver(
    name: &str,
) -> (
    DestinationDriver,
    Sender<Command>,
    Receiver<News>,
    std::fs::File,
) {
    let path = format!("/dev/shm/godwit-driver-{name}-{}", std::process::id());
    let ram = RamFile::create(path.as_ref(), 4 << 20, None).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let memory = Arc::new(Memory::new(Arc::new(ram)).unwrap());
    let ((commands, received), (told, news)) = (channel(), channel());
    let driver = DestinationDriver {
        arrivals: Arrivals::listen(&spec(), &[[127, 0, 0, 1].into()], (0, 0)).unwrap(),
        pages: memory.ram.page_count(),
        memory,
        disks: Disks::default(),
        take_layers: Box::new(|_, _| Ok(())),
        begin_disks: Box::new(|| Ok(())),
        keep_disks: Box::new(|_| Ok(())),
        qemu: None,
        report: crate::testing::report(Side::Destination),
        control: ControlSlot::default(),
        variables: None,
        prepare: false,
        cores: 1,
        told_prepared: false,
        news: Box::new(move |news| told.send(news).unwrap_or_default()),
        commands: received,
        held_back: Vec::new(),
        next_control: None,
        lingers: false,
        connected: false,
        first_pass: Arc::new(AtomicBool::new(true)),
        carried: 0,
        wire: WireRate::default(),
        began: Instant::now(),
    };
    (driver, commands, news, file)
}

const LONG: Duration = Duration::from_secs(60);

/// Says something and waits for the answer that is wanted.
fn say(
    control: &mut (ControlSender, ControlReceiver),
    messages: &[ToDestination],
    wanted: impl Fn(&ToSource) -> bool,
) {
    let until = Instant::now() + LONG;
    for message in messages {
        control.0.send(&encode(message), until).unwrap();
    }
    loop {
        let Ok(Incoming::Message(bytes)) = control.1.recv(until) else {
            panic!("it is not answered");
        };
        if wanted(&decode_to_source(&bytes, 64).unwrap()) {
            return;
        }
    }
}

/// Threads of this process with this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let comm = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    tasks
        .filter_map(|task| comm(task).ok())
        .filter(|comm| comm.trim_end() == name)
        .count()
}

#[test]
fn a_source_that_has_sent_its_last_pages_has_no_way_left_into_guest_memory() {
    // An index that no other test's channel has: its thread is looked for by name.
    const INDEX: u16 = 29;
    let (driver, commands, _news, file) = driver("hostile");
    let to = driver.arrivals.addresses[0];
    let running = std::thread::spawn(move || driver.run());
    let until = Instant::now() + LONG;
    let made = |channel| connect(to, &ConnectOptions::default(), &spec(), channel, until).unwrap();
    let mut control = made(ChannelId::control(0)).into_control().unwrap();
    let begin = ToDestination::Begin {
        version: PROTOCOL_VERSION,
        set: 0,
        streams: 1,
        pages: 1024,
        changes: 0,
    };
    say(&mut control, &[begin], |said| {
        matches!(said, ToSource::Begun { .. })
    });
    let (_, mut data) = made(ChannelId::data(0, INDEX).unwrap()).split();
    let mut send = |page: u64| {
        let mut runs = PageRuns::new();
        runs.push(PageRun {
            first: page,
            count: 1,
        })
        .unwrap();
        let bytes = [7; PAGE_SIZE];
        data.send_pages(&runs, &[&bytes], &Patience::idle(LONG))
    };
    send(3).unwrap();
    let mut sent = vec![0; usize::from(INDEX)];
    sent.push(2);
    let last = [
        ToDestination::Stopped,
        ToDestination::Barrier { iteration: 1, sent },
    ];
    say(&mut control, &last, |said| {
        matches!(said, ToSource::BarrierDone { .. })
    });
    // From here on the destination may load the guest's devices. The kernel lists a thread for a moment after it was joined.
    while threads(&format!("receive-{INDEX}")) > 0 {
        assert!(Instant::now() < until, "somebody still takes pages");
        std::thread::yield_now();
    }
    send(3).and_then(|()| send(5)).unwrap();
    let further = made(ChannelId::data(0, INDEX + 1).unwrap());
    let ping = ToDestination::Ping { nonce: 4 };
    say(&mut control, &[ping], |said| {
        *said == ToSource::Pong { nonce: 4 }
    });
    commands.send(Command::End).unwrap();
    running.join().unwrap();
    drop(further);
    let page = |number: usize| {
        let mut bytes = [0; PAGE_SIZE];
        file.read_exact_at(&mut bytes, (number * PAGE_SIZE) as u64)
            .unwrap();
        bytes
    };
    assert_eq!(page(3), [7; PAGE_SIZE], "what came before the barrier");
    assert_eq!(page(5), [0; PAGE_SIZE], "what came behind it");
}
