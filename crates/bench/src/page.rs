//! The results as one HTML page that needs nothing else: pictures, comparisons, every cell, the machine.
//!
//! Pure: out of the results alone. Text of others (sentences of failures) is escaped.

use crate::group::groups;
use crate::judge::lines;
use crate::picture;
use crate::row::{Results, Row};
use crate::table::{also, figures, peer, target, verdict};
use godwit_testkit::report::svg::escape;
use std::fmt::Write as _;

const HEAD: &str = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
    <meta name=\"viewport\" content=\"width=device-width\"><title>Godwit: moves of memory, measured</title><style>\
    body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
    table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}td,th{padding:.2em .6em;text-align:left;\
    border-bottom:1px solid #ddd}svg{max-width:100%;height:auto;margin:.6em 0}.reached{color:#1a7f37}.missed{color:#c0281c;\
    font-weight:600}pre{font-size:12px;overflow-x:auto}@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}\
    td,th{border-color:#444}.reached{color:#5fce7f}.missed{color:#ff7a6e}}</style>";

const EXPLAINED: &str = "<p>All systems ran in the same bench, taking turns, on the same guests, between the same two test \
    hosts on one machine. <b>s from the command</b> begins when the move is asked for, before the destination's QEMU is \
    started, and ends at the RESUME event there; preparation is part of it. <b>Switchover</b> is from the STOP event at the \
    source to the RESUME event at the destination. <b>GB/s</b> is the guest's memory over the time without preparation. \
    <b>core-s/GB</b> counts all processes of a host but the vCPUs. A peer is cut off at ten times our time. \
    Medians; in brackets the smallest and the largest run.</p>";

/// The page.
pub fn html(results: &Results) -> String {
    let mut page = String::from(HEAD);
    page.push_str("<h1>Moves of memory, measured</h1>");
    page.push_str(EXPLAINED);
    page.push_str(&comparisons(&results.rows));
    page.push_str("<h2>Pictures</h2>");
    for (_, svg) in picture::files(results) {
        page.push_str(&svg);
    }
    page.push_str(&everything(&results.rows));
    let machine = serde_json::to_string_pretty(&results.machine).unwrap_or_default();
    let _ = write!(
        page,
        "<h2>The machine</h2><pre>{}</pre></html>",
        escape(&machine)
    );
    page
}

fn comparisons(rows: &[Row]) -> String {
    let mut text = String::from(
        "<h2>Against the targets</h2><table><tr><th>cell<th>what<th>Godwit<th>peer<th>ratio<th>target<th></tr>",
    );
    for line in lines(rows) {
        let peer = peer(&line);
        let (word, class) = match verdict(&line) {
            "reached" => ("reached", "reached"),
            "" => ("", ""),
            _ => ("missed", "missed"),
        };
        let _ = write!(
            text,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td class=\"{class}\">{word}</tr>",
            escape(&line.cell),
            escape(&line.what),
            line.ours.map_or(String::new(), figures),
            escape(&peer),
            line.ratio()
                .map_or(String::new(), |ratio| format!("{ratio:.2}")),
            target(line.target)
        );
    }
    text.push_str("</table>");
    text
}

fn everything(rows: &[Row]) -> String {
    let mut text = String::from(
        "<h2>Every cell</h2><table><tr><th>scenario<th>cell<th>system<th>destination<th>encryption<th>runs<th>s from the \
         command<th>prepared s<th>switchover ms<th>GB/s<th>core-s/GB source<th>destination<th>guest speed<th>memory \
         MiB<th>RAM equal<th>also<th>outcome</tr>",
    );
    for group in groups(rows) {
        let row = group.head();
        let shown =
            |number: fn(&Row) -> Option<f64>| group.spread(number).map_or(String::new(), figures);
        let _ = write!(
            text,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
            escape(&row.scenario),
            escape(&row.cell),
            escape(&group.name()),
            escape(&row.destination),
            escape(&row.encryption),
            group.rows.len(),
            shown(|row| row.total_s),
            shown(|row| (row.prepare_s > 0.0).then_some(row.prepare_s)),
            shown(|row| row.switchover_ms),
            shown(|row| row.throughput_gb_per_s),
            shown(|row| row.cpu_source_s_per_gb),
            shown(|row| row.cpu_destination_s_per_gb),
            shown(|row| row.guest_speed_during),
            shown(|row| row.peak_rss_mib),
            group
                .equal()
                .map_or("", |equal| if equal { "yes" } else { "NO" }),
            also(&group),
            escape(&group.outcome())
        );
    }
    text.push_str("</table>");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_a_failure_is_text_on_the_page() {
        let row = Row {
            scenario: "idle".into(),
            outcome: "failed: <script>".into(),
            ..Row::default()
        };
        let page = html(&Results {
            rows: vec![row],
            ..Results::default()
        });
        assert!(page.contains("failed: &lt;script&gt;") && !page.contains("<script>"));
    }
}
