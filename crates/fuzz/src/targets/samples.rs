//! Valid values of the product's data types, for seeds.
//!
//! Owns nothing. Texts instead of constructors: a seed must not change because a constructor does.

/// A VM as a person writes it.
pub const VM_TOML: &str = r#"name = "web"
vcpus = 2
memory_mib = 1024
cpu = "auto"
machine = "q35"
kernel = "/boot/vmlinuz"
initramfs = "/boot/initrd.img"
cmdline = "console=ttyS0 quiet"
accelerator = "tcg"
encryption = "required"
[[nic]]
port_group = "vm"
mac = "52:54:00:12:34:56"
[[nic]]
port_group = "backup"
[[disk]]
name = "data"
path = "/srv/data.img"
read_only = true
"#;

/// The same in JSON.
pub const VM: &str = r#"{"name":"web","vcpus":2,"memory_mib":1024,"cpu":"max","machine":"pc-q35-7.2","kernel":"/boot/vmlinuz","initramfs":"/boot/initrd.img","cmdline":"quiet","accelerator":"tcg","encryption":"required","nic":[{"port_group":"vm","mac":"52:54:00:12:34:56"}],"disk":[{"name":"d","path":"/d.img","read_only":true}]}"#;

/// What the controller gives to both hosts.
pub const MIGRATION: &str = r#"{"id":"m1","vm":"web","generation":2,"source":{"host":"a","address":"192.0.2.1:7441"},"destination":{"host":"b","address":"[2001:db8::2]:7441"},"secret":{"key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","nonce":"AAAAAAAAAAA="},"cipher":"aes-256-gcm","max_downtime_ms":50,"deadline_s":null,"max_bandwidth_mbit_per_s":1000,"source_addresses":["192.0.2.1","2001:db8::1"],"destination_addresses":["192.0.2.2:49152"]}"#;

pub const REPORT: &str = r#"{"id":"m1","vm":"web","from":"a","to":"b","outcome":"completed","phase":"ended","reason":null,"side":"source","encryption":"aes-256-gcm","streams":2,"total_s":1.5,"switchover_ms":20.5,"switchover_parts_ms":{"stop_ms":1,"last_pages_ms":2,"device_save_ms":3,"device_load_ms":4,"permit_ms":5,"resume_ms":5.5},"iterations":[{"pages_sent":10,"zero_pages":20,"bytes":40960,"seconds":0.5,"limited_by":"link"}],"bytes_on_wire":41000,"throughput_gb_per_s":0.5,"cpu_source_s":1,"cpu_destination_s":1,"network_gap_ms":null,"guest_clock_lag_ms":2.5,"dirty_mib_per_s":3,"promise":{"max_downtime_ms":50,"kept":true},"ram_mib":1024,"remaining_bytes":0,"eta_s":null,"guest_speed_percent":100,"began_unix_s":1700000000}"#;

/// A VM at its host.
pub const HOST_VM: &str = r#"{"spec":SPEC,"state":"running","generation":2,"holds":true,"migration":null,"accelerator":"tcg","vm_process_pid":10,"qemu_pid":11,"note":null}"#;

pub const PEER: &str = r#"{"message":"permit","migration":"m1","generation":2}"#;

/// A certificate with the role of host "a", DER in base64. Its key was thrown away.
pub const CERTIFICATE: &str = concat!(
    "MIIBiDCCAS+gAwIBAgIUC9s1NGoFsG4yI2TjszTJSTiJkxwwCgYIKoZIzj0EAwIwDDEKMAgGA1UEAwwBYTAgFw0yNjExMjEwOTU1",
    "NTRaGA8yMTI2MTAyODA5NTU1NFowDDEKMAgGA1UEAwwBYTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABJ51/cvfr1jrZvy4p8Pj",
    "5K87icdygedjX0hFqFsdOz66DmauN+QoKZo9K+kJ3lESjvHRo5FHepXaD9bv3vupWc6jbTBrMB0GA1UdDgQWBBStROoBTkdokBJH",
    "ear7Y5Fud4B3SjAfBgNVHSMEGDAWgBStROoBTkdokBJHear7Y5Fud4B3SjAPBgNVHRMBAf8EBTADAQH/MBgGA1UdEQQRMA+GDWdv",
    "ZHdpdDpob3N0OmEwCgYIKoZIzj0EAwIDRwAwRAIgLngc+8WUcPjAVrK9R2CeGFMDqWAEMgN+mBo7Z+Wn9uQCIB8C9vRJJ7/pYkmc",
    "fOoTZCFGikh/BKdg6vWyDnHZ+UXq",
);

/// Puts the samples into a text that names them.
pub fn fill(text: &str) -> Vec<u8> {
    text.replace("HOST_VM", HOST_VM)
        .replace("SPEC", VM)
        .replace("MIGRATION", MIGRATION)
        .replace("REPORT", REPORT)
        .replace("PEER", PEER)
        .into_bytes()
}
