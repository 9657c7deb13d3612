//! HTML pages, and tables that are HTML or Markdown.
//!
//! Text has two marks: `**so**` is strong and `` `so` `` is code; everything else in it is text. Owns the page that it writes.

use super::escape;
use std::fmt::Write as _;

pub struct Page(String);

impl Page {
    pub fn new(title: &str) -> Self {
        Self(format!(
            "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <title>{}</title><style>{}</style></head><body><main>",
            escape(title),
            include_str!("style.css")
        ))
    }

    /// A heading, 1 the highest.
    pub fn heading(&mut self, level: u8, text: &str) {
        let _ = write!(self.0, "<h{level}>{}</h{level}>", marked(text));
    }

    pub fn paragraph(&mut self, class: &str, text: &str) {
        let _ = write!(self.0, "<p class=\"{class}\">{}</p>", marked(text));
    }

    /// A box whose heading ends in a verdict: whether it is a good one, and its words.
    pub fn judged_card(&mut self, heading: &str, verdict: Option<(bool, &str)>, markup: &str) {
        let class = |good| if good { "good" } else { "bad" };
        let told = verdict.map(|(good, words)| {
            let (class, words) = (class(good), escape(words));
            format!(" <span class=\"{class}\">{words}</span>")
        });
        let (heading, told) = (marked(heading), told.unwrap_or_default());
        self.card("", &format!("<h3>{heading}{told}</h3>{markup}"));
    }

    /// A box with a heading, or without where that is empty.
    pub fn card(&mut self, heading: &str, markup: &str) {
        self.0.push_str("<div class=\"card\">");
        if !heading.is_empty() {
            self.heading(3, heading);
        }
        self.0.push_str(markup);
        self.0.push_str("</div>");
    }

    /// Markup as it is.
    pub fn markup(&mut self, markup: &str) {
        self.0.push_str(markup);
    }

    pub fn end(self) -> String {
        self.0 + "</main></body></html>\n"
    }
}

/// Names with the colours that they have in a picture: a class of the style sheet, whether it is a line's, and the name.
pub fn legend(keys: &[(String, bool, String)]) -> String {
    let mut list = String::from("<ul class=\"legend\">");
    for (colour, of_line, name) in keys {
        let class = if *of_line { " class=\"key\"" } else { "" };
        let name = escape(name);
        let _ = write!(
            list,
            "<li><i{class} style=\"background:var(--{colour})\"></i>{name}</li>"
        );
    }
    list + "</ul>"
}

/// Text with its two marks as markup.
pub fn marked(text: &str) -> String {
    let mut markup = escape(text);
    for (mark, tag) in [("**", "b"), ("`", "code")] {
        let parts: Vec<&str> = markup.split(mark).collect();
        if parts.len().is_multiple_of(2) {
            continue;
        }
        let each = parts
            .iter()
            .enumerate()
            .map(|(index, part)| match index % 2 {
                0 => (*part).to_owned(),
                _ => format!("<{tag}>{part}</{tag}>"),
            });
        markup = each.collect();
    }
    markup
}

/// A table of texts. In HTML numbers stand to the right; a strong text is bad news, "yes" and "reached" are good.
#[derive(Default)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    bars: Option<(String, Vec<Option<f64>>)>,
}

impl Table {
    pub fn new<T: Into<String>>(head: impl IntoIterator<Item = T>) -> Self {
        let head = head.into_iter().map(Into::into).collect();
        Self {
            head,
            ..Self::default()
        }
    }

    /// In HTML: with a second column of bars, each a share of 1.
    pub fn with_bars(mut self, title: &str, shares: Vec<Option<f64>>) -> Self {
        self.bars = Some((title.to_owned(), shares));
        self
    }

    pub fn row<T: Into<String>>(&mut self, row: impl IntoIterator<Item = T>) {
        self.rows.push(row.into_iter().map(Into::into).collect());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn html(&self, class: &str) -> String {
        let mut table = format!("<table class=\"{class}\"><thead><tr>");
        for (index, title) in self.head.iter().enumerate() {
            let _ = write!(table, "<th>{}</th>", marked(title));
            if let (0, Some((title, _))) = (index, &self.bars) {
                let _ = write!(table, "<th class=\"left\">{}</th>", marked(title));
            }
        }
        table.push_str("</tr></thead><tbody>");
        for (number, row) in self.rows.iter().enumerate() {
            table.push_str("<tr>");
            for (index, text) in row.iter().enumerate() {
                table.push_str(&cell(text));
                if let (0, Some((_, shares))) = (index, &self.bars) {
                    let percent = shares.get(number).copied().flatten().unwrap_or(0.0) * 100.0;
                    let bar = format!("<span class=\"bar\" style=\"width:{percent:.1}%\"></span>");
                    let _ = write!(table, "<td class=\"bars\">{bar}</td>");
                }
            }
            table.push_str("</tr>");
        }
        table + "</tbody></table>"
    }

    pub fn markdown(&self) -> String {
        let line = |row: &[String]| {
            let cells: Vec<String> = row.iter().map(|text| text.replace('|', "/")).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        format!(
            "{}|{}\n{rows}",
            line(&self.head),
            "---|".repeat(self.head.len())
        )
    }
}

/// Numbers stand to the right, words to the left.
fn cell(text: &str) -> String {
    let class = match text.chars().next() {
        Some('0'..='9' | '-' | '?') | None => "",
        Some('*') => " class=\"left bad\"",
        _ if matches!(text, "reached" | "yes") => " class=\"left good\"",
        _ => " class=\"left\"",
    };
    format!("<td{class}>{}</td>", marked(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_markup_and_other_text_stays_text() {
        assert_eq!(
            marked("**a** `b` <c> & **"),
            "**a** <code>b</code> &lt;c&gt; &amp; **"
        );
        assert_eq!(marked("**a** b"), "<b>a</b> b");
        let mut table = Table::new(["a", "b|c"]);
        table.row(["<x>", "**missed**"]);
        assert!(table.html("").contains(
            "<td class=\"left\">&lt;x&gt;</td><td class=\"left bad\"><b>missed</b></td>"
        ));
        assert_eq!(
            table.markdown(),
            "| a | b/c |\n|---|---|\n| <x> | **missed** |\n"
        );
    }
}
