//! The Linux guest on a lab host: boots under TCG, is reachable by both families, serves Redis and the probe.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use godwit_testkit::guest::linux::{GuestNetwork, LinuxGuest, command_line, target_dir};
use godwit_testkit::lab::{Lab, LabConfig, Machine};

const IP4: &str = "10.77.0.10";
const IP6: &str = "fd77::10";

struct Guest {
    qemu: Child,
    qmp: ChildStdin,
    console: BufReader<std::process::ChildStderr>,
}

/// Boots on host a with a tap on its bridge; the console goes to QEMU's standard error, QMP to its standard input.
fn boot(host: &Machine) -> Option<Guest> {
    let Ok(image) = LinuxGuest::find(&target_dir().expect("under target")) else {
        println!(
            "skipped: no Linux guest image, make it with: cargo run --release --bin guest-image"
        );
        return None;
    };
    let tap = "ip tuntap add tap0 mode tap vnet_hdr && ip link set tap0 master vmbr0 up";
    assert!(
        host.command("sh")
            .args(["-c", tap])
            .status()
            .expect("sh")
            .success()
    );
    let network = GuestNetwork {
        ip4: Some(format!("{IP4}/24")),
        ip6: Some(format!("{IP6}/64")),
    };
    let mut qemu = host
        .command("timeout")
        .args(["180", "qemu-system-x86_64"])
        .args("-nodefaults -no-user-config -display none -vga none -accel tcg -cpu max -machine q35 -m 512M".split(' '))
        .args("-netdev tap,id=n,ifname=tap0,script=no,downscript=no -device virtio-net-pci,netdev=n,romfile=".split(' '))
        .args("-chardev file,id=console,path=/proc/self/fd/2 -serial chardev:console -qmp stdio".split(' '))
        .args(["-append", &command_line(&network), "-kernel"])
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initrd)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("QEMU starts");
    let qmp = qemu.stdin.take().expect("piped");
    let console = BufReader::new(qemu.stderr.take().expect("piped"));
    Some(Guest { qemu, qmp, console })
}

impl Guest {
    /// Waits for a line on the console; `timeout` ends a QEMU that never says it, and with it the console.
    fn wait_line(&mut self, wanted: &str) {
        let mut line = String::new();
        while self.console.read_line(&mut line).expect("console") > 0 {
            if line.contains(wanted) {
                println!("{}", line.trim());
                return;
            }
            line.clear();
        }
        panic!("the console ended before: {wanted}");
    }

    fn execute(&mut self, command: &str) {
        let capabilities = r#"{"execute": "qmp_capabilities"}"#;
        writeln!(self.qmp, "{capabilities}{{\"execute\": \"{command}\"}}").expect("QMP");
        self.qmp.flush().expect("QMP");
    }
}

fn ask(client: &Machine, address: &str, port: u16, question: &str) -> String {
    let address = SocketAddr::new(address.parse::<IpAddr>().expect("an address"), port);
    let connect = || TcpStream::connect_timeout(&address, Duration::from_secs(10));
    let mut stream = client
        .in_network(connect)
        .expect("the client's network")
        .expect("the guest listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .expect("a timeout");
    stream.write_all(question.as_bytes()).expect("sent");
    let mut answer = [0; 512];
    let length = stream.read(&mut answer).expect("answered");
    String::from_utf8_lossy(&answer[..length]).trim().to_owned()
}

#[test]
fn it_boots_serves_reboots_panics_and_powers_off() {
    let lab = Lab::new(LabConfig {
        name: "guest".into(),
        ..LabConfig::default()
    })
    .expect("a lab");
    let (host, client) = (lab.host(0).expect("a"), lab.client().expect("client"));
    let started = Instant::now();
    let Some(mut guest) = boot(host) else { return };
    guest.wait_line("godwit-guest: ready");
    println!(
        "redis answers {:.1} s after QEMU's start",
        started.elapsed().as_secs_f64()
    );
    for address in [IP4, IP6] {
        assert_eq!(ask(client, address, 6379, "PING\r\n"), "+PONG");
        assert!(ask(client, address, 7, "mono\n").starts_with("mono_ns "));
    }
    println!("membw: {}", ask(client, IP4, 7, "membw\n"));
    assert!(ask(client, IP4, 7, "fill 16\n").starts_with("ok "));
    assert_eq!(ask(client, IP4, 7, "hot 8 4\n"), "ok");
    assert_eq!(ask(client, IP4, 7, "hot 0 0\n"), "ok");
    assert!(ask(client, IP4, 7, "fill -1\n").starts_with("error"));
    assert_eq!(ask(client, IP4, 7, "reboot\n"), "ok");
    guest.wait_line("godwit-guest: ready");
    assert_eq!(ask(client, IP6, 7, "panic\n"), "ok");
    guest.wait_line("godwit-guest: ready"); // the kernel reboots at once after a panic
    guest.execute("system_powerdown");
    guest.console.read_to_end(&mut Vec::new()).expect("console");
    assert!(
        guest.qemu.wait().expect("QEMU ends").success(),
        "the power button ends the guest"
    );
}
