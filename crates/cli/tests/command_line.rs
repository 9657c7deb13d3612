//! The real binary: help of every command, error sentences and exit codes of bad input.
//!
//! Golden texts are in `tests/golden`; `UPDATE_GOLDEN=1` writes them anew. Nothing here needs a controller.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The binary in a clean environment without a terminal, pointed at sockets that do not exist.
fn command(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    command
        .args(words)
        .env_clear()
        .env("GODWIT_AGENT", "/nonexistent/agent.sock")
        .env("GODWIT_CONTROLLER", "/nonexistent/controller.sock")
        .env("COLUMNS", "100")
        .stdin(Stdio::null());
    command
}

fn godwit(words: &[&str]) -> Output {
    command(words).output().unwrap()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

fn same_as_golden(name: &str, found: &str) {
    let path = golden(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        found,
        expected,
        "{} differs; UPDATE_GOLDEN=1 writes it anew",
        path.display()
    );
}

fn golden_help() -> String {
    std::fs::read_to_string(golden("help.txt")).unwrap()
}

fn fails(words: &[&str], exit: i32, sentence: &[&str]) {
    let output = godwit(words);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(exit), "{words:?}: {errors}");
    for part in sentence {
        assert!(
            errors.contains(part),
            "{words:?}: '{part}' is not in: {errors}"
        );
    }
}

/// What a command says of itself.
fn help_of(words: &str, columns: &str) -> String {
    let mut help = command(&words.split_whitespace().collect::<Vec<_>>());
    let output = help.arg("--help").env("COLUMNS", columns).output().unwrap();
    assert!(output.status.success(), "{words}");
    String::from_utf8(output.stdout).unwrap()
}

/// This command and all below it that are shown, with the help of each.
fn help_from(words: &str, columns: &str) -> Vec<(String, String)> {
    let help = help_of(words, columns);
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    // What goes on on a line of its own is indented further.
    let names = listed
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty() && *name != "help");
    let below: Vec<_> = names
        .flat_map(|name| help_from(format!("{words} {name}").trim_start(), columns))
        .collect();
    let mut all = vec![(words.to_owned(), help)];
    all.extend(below);
    all
}

#[test]
fn help_of_every_command_keeps_within_80_columns() {
    for (words, text) in help_from("", "80") {
        let wide = text.lines().filter(|line| line.chars().count() > 80);
        assert_eq!(wide.collect::<Vec<_>>(), Vec::<&str>::new(), "{words}");
    }
}

#[test]
fn help_of_every_command_is_as_it_was() {
    let mut all = String::new();
    for (words, text) in help_from("", "100") {
        assert!(text.contains("Usage: godwit"), "{words}");
        let command = format!("godwit {words}");
        all.push_str(&format!("$ {} --help\n{text}\n", command.trim_end()));
    }
    same_as_golden("help.txt", &all);
}

#[test]
fn wrong_usage_is_exit_code_2() {
    fails(&["vm", "fly"], 2, &["unrecognized subcommand 'fly'"]);
    fails(&["vm", "migrate", "web"], 2, &["--to"]);
    fails(&["vm", "start", "../web"], 2, &["not a valid name"]);
    fails(
        &["vm", "migrate", "web", "--to", "b", "--encryption", "maybe"],
        2,
        &["opportunistic"],
    );
}

#[test]
fn what_a_person_decides_names_its_host_and_vm() {
    fails(&["host", "fenced"], 2, &["<HOST>"]);
    fails(&["host", "fenced", "../b"], 2, &["not a valid name"]);
    fails(
        &["host", "boot-alone", "b"],
        2,
        &["unexpected argument 'b'"],
    );
    fails(&["vm", "forget-record"], 2, &["<VM>"]);
    fails(&["site"], 2, &["show"]);
    fails(&["site", "show", "b"], 2, &["unexpected argument 'b'"]);
}

#[test]
fn a_vm_is_resolved_in_one_way_at_a_time() {
    fails(
        &["vm", "resolve", "web"],
        2,
        &["--run-on", "--give-up-on", "--keep"],
    );
    fails(&["vm", "resolve", "web", "--keep"], 2, &["--keep <HOST>"]);
    for other in ["--run-on", "--give-up-on", "--confirm-fenced"] {
        fails(
            &["vm", "resolve", "web", "--keep", "a", other, "b"],
            2,
            &["--keep <HOST>", other, "cannot be used with"],
        );
    }
    fails(
        &["vm", "resolve", "web", "--run-on", "a", "--give-up-on", "b"],
        2,
        &["cannot be used with"],
    );
}

#[test]
fn a_figure_out_of_bounds_is_refused_by_its_option_s_name_with_an_example() {
    for (option, bad) in [
        ("--max-downtime", "0"),
        ("--deadline", "0"),
        ("--max-bandwidth", "abc"),
        ("--max-guest-slowdown", "100"),
    ] {
        let words = ["vm", "migrate", "web", "--to", "b", option, bad];
        fails(&words, 2, &[option, "write a whole number from", "such as"]);
    }
}

#[test]
fn a_missing_file_is_said_to_be_missing() {
    let remote = [
        "--controller",
        "127.0.0.1:1",
        "--certificate",
        "/nonexistent",
    ];
    let list = [&remote[..], &["vm", "list"]].concat();
    fails(&list, 3, &["no such file", "'godwit operator add'"]);
    let leave = ["host", "leave", "--config", "/nonexistent/host.toml"];
    fails(&leave, 2, &["nothing to leave", "/nonexistent/host.toml"]);
}

/// Commands that make a VM run twice if what they say is not so, with what they ask.
const WORDS: [(&[&str], &str); 3] = [
    (&["host", "fenced", "b"], "Is host b powered off now?"),
    (
        &["host", "boot-alone"],
        "Does no other host run the VMs that this host waits to boot?",
    ),
    (
        &["vm", "forget-record", "web"],
        "Does this host not run VM web?",
    ),
];

#[test]
fn nobody_s_word_is_given_without_a_terminal_and_without_yes() {
    for (words, question) in WORDS {
        fails(words, 3, &[question, "Say so with --yes"]);
    }
}

#[test]
fn a_yes_that_was_typed_into_a_pipe_is_no_word() {
    use std::io::Write as _;
    for (words, question) in WORDS {
        let mut child = command(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It may be gone already: it does not read this.
        let _ = child.stdin.take().unwrap().write_all(b"yes\n");
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{words:?}: {errors}");
        assert!(errors.contains(question), "{errors}");
    }
}

#[test]
fn a_word_that_was_given_goes_to_the_controller_or_to_this_host_s_agent() {
    let controller = "no controller listens on /nonexistent/controller.sock";
    fails(&["host", "fenced", "b", "--yes"], 1, &[controller]);
    let agent = "no agent runs on this machine";
    fails(&["host", "boot-alone", "--yes"], 1, &[agent]);
    fails(&["vm", "forget-record", "web", "--yes"], 1, &[agent]);
}

#[test]
fn every_text_that_offers_to_resolve_a_doubt_says_when_that_is_right() {
    let help = golden_help();
    let offers = help
        .split("\n\n")
        .filter(|part| part.contains("godwit vm resolve") && part.contains("--confirm-fenced"));
    let mut found = 0;
    for offer in offers.filter(|part| !part.contains("Usage:")) {
        assert!(offer.contains("powered off"), "{offer}");
        found += 1;
    }
    assert!(found > 0, "no help offers it any more");
}

#[test]
fn a_vm_description_with_a_wrong_key_names_key_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("web.toml");
    std::fs::write(
        &path,
        "name = \"web\"\nvcpu = 1\nmemory_mib = 64\nkernel = \"/boot/vmlinuz\"\n",
    )
    .unwrap();
    let file = path.to_str().unwrap();
    fails(&["vm", "create", file], 2, &["web.toml", "vcpu", "line 2"]);
    std::fs::write(
        &path,
        "name = \"web\"\nvcpus = 1\nmemory_mib = 63\nkernel = \"/boot/vmlinuz\"\n",
    )
    .unwrap();
    fails(
        &["vm", "create", file],
        2,
        &["memory_mib = 63", "even number"],
    );
    std::fs::write(
        &path,
        "name = \"web\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"vmlinuz\"\n",
    )
    .unwrap();
    fails(
        &["vm", "edit", "web", file],
        2,
        &["kernel = \"vmlinuz\"", "absolute path"],
    );
    fails(
        &["vm", "create", "/nonexistent.toml"],
        2,
        &["/nonexistent.toml", "give the path"],
    );
}

#[test]
fn without_controller_and_agent_every_command_says_where_to_go() {
    for words in [
        &["vm", "list"][..],
        &["vm", "start", "web"],
        &["host", "list"],
        &["migration", "show", "m1"],
        &["site", "show"],
        &["vm", "resolve", "web", "--keep", "a"],
        &["vm", "migrate", "web", "--to", "b"],
    ] {
        fails(
            words,
            1,
            &[
                "no controller listens on /nonexistent/controller.sock",
                "godwit controller run",
            ],
        );
    }
}

#[test]
fn errors_are_json_where_asked() {
    let output = godwit(&["vm", "list", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["error"]["code"], "host-unreachable");
    assert!(output.stderr.is_empty());
}

#[test]
fn a_controller_is_named_by_its_ip_address_and_who_writes_a_name_is_told_so() {
    let list = ["vm", "list", "--controller"];
    for name in ["ctl.example.org:8471", "ctl"] {
        fails(&[&list[..], &[name]].concat(), 2, &[name, "IP address"]);
    }
    // The port may be left out, as with 'controller init'.
    let wants = "the controller at 10.0.0.1:8471 wants an operator certificate";
    fails(&[&list[..], &["10.0.0.1"]].concat(), 3, &[wants]);
}

#[test]
fn a_controller_that_no_token_could_name_is_not_set_up() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("controller.toml");
    let words = ["controller", "init", "--listen", "0.0.0.0", "--config"];
    let words = [&words[..], &[config.to_str().unwrap()]].concat();
    fails(&words, 2, &["no host can reach 0.0.0.0", "--advertise"]);
    assert!(!config.exists());
}

#[test]
fn a_remote_controller_wants_a_certificate() {
    let words = ["vm", "list", "--controller", "127.0.0.1:1"];
    fails(&words, 3, &["operator certificate", "--certificate DIR"]);
    fails(
        &[&words[..], &["--certificate", "/nonexistent"]].concat(),
        3,
        &["/nonexistent"],
    );
}

#[test]
fn bad_tokens_and_configurations_are_refused_with_nothing_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("etc/host.toml");
    let config = config.to_str().unwrap();
    fails(
        &["host", "join", "nonsense", "--config", config],
        3,
        &["not a join token"],
    );
    fails(
        &["agent", "run", "--config", config],
        1,
        &[config, "godwit host join"],
    );
    fails(&["host", "check", "--config", config], 2, &[config]);
    fails(
        &["controller", "run", "--config", config],
        2,
        &[config, "godwit controller init"],
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn an_agent_without_certificate_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("host.toml");
    let text = format!(
        "name = \"a\"\nlisten = \"127.0.0.1:0\"\nmigration_addresses = [\"127.0.0.1\"]\nstate_dir = \"{0}/state\"\nrun_dir = \"{0}/run\"\n",
        dir.path().display()
    );
    std::fs::write(&config, text).unwrap();
    fails(
        &["agent", "run", "--config", config.to_str().unwrap()],
        1,
        &["no usable certificate", "godwit host join"],
    );
}

#[test]
fn manual_pages_and_completions_are_made() {
    let dir = tempfile::tempdir().unwrap();
    let output = godwit(&["man", dir.path().to_str().unwrap()]);
    assert!(output.status.success());
    let page = std::fs::read_to_string(dir.path().join("godwit-vm-migrate.1")).unwrap();
    assert!(page.contains("max\\-downtime"), "{page}");
    let main = std::fs::read_to_string(dir.path().join("godwit.1")).unwrap();
    assert!(main.contains("in doubt"), "{main}");
    assert!(!dir.path().join("godwit-vm-process.1").exists());
    let file = std::fs::read_to_string(dir.path().join("godwit-host.toml.5")).unwrap();
    assert!(file.contains("migration_ports"), "{file}");
    let output = godwit(&["completion", "bash"]);
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("_godwit")
    );
}

#[test]
fn a_command_that_waits_says_so_before_a_person_takes_it_for_a_fault() {
    use std::io::{BufRead as _, BufReader};
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("controller.sock");
    // It takes connections and answers nothing.
    let _mute = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut child = command(&["vm", "stop", "web"])
        .env("GODWIT_CONTROLLER", &socket)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let errors = child.stderr.take().unwrap();
    BufReader::new(errors).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.contains("waiting for the controller"), "{line}");
}

#[test]
fn a_socket_that_a_killed_controller_left_is_no_controller() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("controller.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let mut killed = command(&["vm", "stop", "web"]);
    let output = killed.env("GODWIT_CONTROLLER", &socket).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("no controller listens on"), "{errors}");
    assert!(errors.contains("godwit controller run"), "{errors}");
}

/// What the shell is offered after these words.
fn offered(words: &[&str], controller: &Path) -> String {
    let mut command = command(&["--", "godwit"]);
    let output = command
        .args(words)
        .env("GODWIT_CONTROLLER", controller)
        .env("COMPLETE", "bash")
        .env("_CLAP_IFS", "\n")
        .env("_CLAP_COMPLETE_INDEX", words.len().to_string())
        .env("_CLAP_COMPLETE_COMP_TYPE", "9")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_shell_completes_options_without_a_controller() {
    let nobody = Path::new("/nonexistent/controller.sock");
    assert!(offered(&["vm", "migrate", "--t"], nobody).contains("--to"));
    assert_eq!(offered(&["vm", "migrate", "we"], nobody), "");
}

#[test]
fn the_shell_completes_names_that_the_controller_knows() {
    use std::io::{Read as _, Write as _};
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("controller.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut head = [0; 4096];
            let len = stream.read(&mut head).unwrap();
            if len == 0 {
                // A command first looks whether somebody listens.
                continue;
            }
            let is_vms = head[..len].starts_with(b"GET /v1/vms ");
            let vm = r#"[{"spec":{"name":"web","vcpus":1,"memory_mib":64,"kernel":"/k"},"state":"running","host":"a","generation":1}]"#;
            let body = if is_vms {
                vm
            } else {
                r#"{"version":"1","ca_fingerprint":"f"}"#
            };
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    assert_eq!(offered(&["vm", "migrate", "we"], &socket).trim(), "web");
}

#[test]
fn a_start_tells_of_a_disk_that_is_made_from_an_image_first() {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("controller.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let mut starts = 0;
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut heard = BufReader::new(stream.try_clone().unwrap());
            let head: Vec<String> = heard
                .by_ref()
                .lines()
                .map_while(Result::ok)
                .take_while(|line| !line.is_empty())
                .collect();
            let Some(asked) = head.first() else {
                continue;
            };
            let long = |line: &String| {
                line.to_lowercase()
                    .strip_prefix("content-length: ")?
                    .parse::<u64>()
                    .ok()
            };
            let len = head.iter().find_map(long).unwrap_or(0);
            heard.take(len).read_to_end(&mut Vec::new()).unwrap();
            let body = match asked.split(' ').nth(1).unwrap() {
                "/v1/vms/web/start" if starts == 0 => {
                    starts += 1;
                    r#"{"message": "", "making": {"disk": "root", "done_bytes": 1073741824, "total_bytes": 4294967296}}"#
                }
                "/v1/vms/web/start" => r#"{"message": "VM web runs"}"#,
                _ => "{}",
            };
            let len = body.len();
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close";
            let answer = format!("{head}\r\ncontent-length: {len}\r\n\r\n{body}");
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let controller = socket.to_str().unwrap();
    let output = godwit(&["vm", "start", "web", "--controller", controller]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    assert!(
        told.contains("disk root is being made, 1024.0 MiB of 4096.0 MiB"),
        "{told}"
    );
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("VM web runs"), "{said}");
}
