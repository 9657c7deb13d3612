//! Manual pages of section 5, for the files that people write: made of `docs/configuration.md` and the packaged examples.
//!
//! Owns nothing. Refuses nothing: the tests hold that each key has its row in the document.

/// The document that lists every key of every file.
pub const DOCUMENT: &str = include_str!("../../../docs/configuration.md");

/// A file that people write, and where its page finds what it says.
struct File {
    page: &'static str,
    /// What is said after the name.
    about: &'static str,
    /// Its part of the document.
    heading: &'static str,
    /// How to make one.
    made_by: &'static str,
    example: &'static str,
}

const FILES: [File; 3] = [
    File {
        page: "godwit-host.toml",
        about: "configuration of a Godwit host",
        heading: "## A host",
        made_by: "`/etc/godwit/host.toml` is read by the agent of a host. `godwit host join` writes it.",
        example: include_str!("../../../packaging/examples/host.toml.example"),
    },
    File {
        page: "godwit-controller.toml",
        about: "configuration of a Godwit controller",
        heading: "## The controller",
        made_by: "`/etc/godwit/controller.toml` is read by the controller. `godwit controller init` writes it.",
        example: include_str!("../../../packaging/examples/controller.toml.example"),
    },
    File {
        page: "godwit-vm.toml",
        about: "description of a Godwit VM",
        heading: "## A VM",
        made_by: "A file of any name describes one VM. It is given to `godwit vm create` and `godwit vm edit`.",
        example: include_str!("../../../packaging/examples/vm.toml.example"),
    },
];

/// Name and text of each page.
pub fn all() -> impl Iterator<Item = (&'static str, String)> {
    FILES.iter().map(|file| (file.page, file.render()))
}

/// The part of the document under a heading, up to the next one of its kind.
pub fn part<'a>(document: &'a str, heading: &str) -> Option<&'a str> {
    let (_, rest) = document.split_once(heading)?;
    Some(rest.split_once("\n## ").map_or(rest, |(part, _)| part))
}

impl File {
    fn render(&self) -> String {
        let name = escaped(self.page);
        let mut text = format!(
            ".TH {name} 5 \"\" \"godwit {}\" \"Files of Godwit\"\n.SH NAME\n{name} \\- {}\n.SH DESCRIPTION\n{}\n",
            env!("CARGO_PKG_VERSION"),
            self.about,
            inline(self.made_by)
        );
        for paragraph in introduction() {
            text += &format!(".PP\n{}\n", inline(&paragraph));
        }
        text += ".SH KEYS\n";
        let keys = part(DOCUMENT, self.heading).unwrap_or_default();
        for (key, default, what) in keys.lines().filter_map(row) {
            let value = match default
                .strip_prefix('(')
                .and_then(|it| it.strip_suffix(')'))
            {
                Some(told) => capital(told),
                None => format!("Default: {default}"),
            };
            let value = if default.is_empty() {
                String::new()
            } else {
                format!("{value}. ")
            };
            text += &format!(
                ".TP\n{}\n{}\n",
                inline(key),
                inline(&format!("{value}{what}"))
            );
        }
        text += ".SH EXAMPLE\n.nf\n";
        for line in self.example.lines() {
            text += &format!("{}\n", escaped(line));
        }
        text + ".fi\n.SH SEE ALSO\n.BR godwit (1);\nports, users, rights and directories: docs/configuration.md of Godwit\n"
    }
}

/// What the document says of all files: paragraphs of its head that are no list and no heading.
fn introduction() -> impl Iterator<Item = String> {
    let head = DOCUMENT.split("\n## ").next().unwrap_or_default();
    let paragraphs = head.split("\n\n").skip(1);
    let prose = paragraphs.filter(|text| !text.starts_with('-'));
    prose.map(|text| text.trim().replace('\n', " "))
}

/// A row of a table of keys.
fn row(line: &str) -> Option<(&str, &str, &str)> {
    let cells = line.strip_prefix('|')?.strip_suffix('|')?.split('|');
    let mut cells = cells.map(str::trim);
    let (key, default, what) = (cells.next()?, cells.next()?, cells.next()?);
    key.starts_with('`').then_some((key, default, what))
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

/// Text with code marks, in which code becomes bold.
fn inline(text: &str) -> String {
    let parts = text
        .split('`')
        .enumerate()
        .map(|(index, part)| match index % 2 {
            0 => escaped(part),
            _ => format!("\\fB{}\\fR", escaped(part)),
        });
    parts.collect()
}

/// What groff shows as it stands.
pub fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    // At the beginning of a line these would be read as a request.
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}
