//! The text format of Prometheus, version 0.0.4: families of samples, each with HELP and TYPE.
//!
//! Plain data: owns the text. Refuses: a label whose value breaks out of its line.

use std::fmt::Write as _;

/// What a family's values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Gauge,
    /// Only rises, and begins at 0 when the controller starts.
    Counter,
}

type Label = (&'static str, String);

/// One line: a value and what it is of.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    labels: Vec<Label>,
    value: f64,
}

impl Sample {
    pub fn new(labels: Vec<Label>, value: f64) -> Self {
        Self { labels, value }
    }
}

/// Shorthand for a sample with borrowed labels.
pub fn sample(labels: &[(&'static str, &str)], value: f64) -> Sample {
    let labels = labels.iter().map(|(name, of)| (*name, (*of).to_owned()));
    Sample::new(labels.collect(), value)
}

/// The text as far as it is written.
#[derive(Debug, Default)]
pub struct Page(String);

impl Page {
    /// A family with all its samples; one without any is left out.
    pub fn family(
        &mut self,
        name: &str,
        kind: Kind,
        help: &str,
        samples: impl IntoIterator<Item = Sample>,
    ) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        let help = help.replace('\\', r"\\").replace('\n', r"\n");
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
        for sample in samples {
            let (labels, value) = (labelled(&sample.labels), number(sample.value));
            self.line(format_args!("{name}{labels} {value}"));
        }
    }

    /// A gauge with one value of the whole site.
    pub fn one(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, Kind::Gauge, help, [sample(&[], value)]);
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{line}");
    }

    pub fn into_text(self) -> String {
        self.0
    }
}

fn labelled(labels: &[Label]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let each = labels
        .iter()
        .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
    format!("{{{}}}", each.collect::<Vec<_>>().join(","))
}

fn escaped(value: &str) -> String {
    let value = value.replace('\\', r"\\");
    value.replace('"', "\\\"").replace('\n', r"\n")
}

fn number(value: f64) -> String {
    match value {
        f64::INFINITY => "+Inf".into(),
        f64::NEG_INFINITY => "-Inf".into(),
        finite => finite.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_label_breaks_out_of_its_line() {
        let mut page = Page::default();
        let hostile = "a\\\"} 7\ngodwit_in_charge 1";
        page.family(
            "godwit_host_info",
            Kind::Gauge,
            "One\nline \\ of help.",
            [
                sample(&[("host", "a"), ("version", hostile)], 1.0),
                sample(&[], 0.25),
            ],
        );
        page.family("godwit_of_nobody", Kind::Gauge, "Nothing.", []);
        page.family(
            "godwit_sum_total",
            Kind::Counter,
            "A sum.",
            [sample(&[], 3e21)],
        );
        let expected = [
            r"# HELP godwit_host_info One\nline \\ of help.",
            "# TYPE godwit_host_info gauge",
            r#"godwit_host_info{host="a",version="a\\\"} 7\ngodwit_in_charge 1"} 1"#,
            "godwit_host_info 0.25",
            "# HELP godwit_sum_total A sum.",
            "# TYPE godwit_sum_total counter",
            "godwit_sum_total 3000000000000000000000",
            "",
        ];
        assert_eq!(page.into_text(), expected.join("\n"));
        let numbers = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -1.5].map(number);
        assert_eq!(numbers, ["+Inf", "-Inf", "NaN", "-1.5"]);
    }
}
