//! The report's pictures: small SVG documents to be put into the page.
//!
//! Colours are classes that the page's style sheet defines, so that one picture serves light and dark. Every mark
//! carries its figures as a title, which browsers show under the pointer.

use std::fmt::Write;

use crate::load::series::{Second, Window};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 26.0;

/// A migration's place in a chart over time.
pub struct Band {
    /// When.
    pub window: Window,
    /// What to call it.
    pub label: String,
}

/// A line over time.
pub struct Line {
    /// What to call it.
    pub name: &'static str,
    /// Class of its colour.
    pub class: &'static str,
    /// Its value in a second.
    pub value: fn(&Second) -> f64,
}

/// How values become heights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// From zero.
    Linear,
    /// Powers of ten; seconds without a value leave a gap.
    Logarithmic,
}

/// A chart over the seconds of the run.
pub struct TimeChart<'a> {
    /// The rows.
    pub seconds: &'a [Second],
    /// The lines.
    pub lines: &'a [Line],
    /// Migrations.
    pub bands: &'a [Band],
    /// Unit of the values.
    pub unit: &'static str,
    /// How values become heights.
    pub scale: Scale,
    /// Height of the picture.
    pub height: f64,
}

/// Writes text so that no markup in it is one.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            _ => safe.push(character),
        }
    }
    safe
}

/// A number with as many digits as a reader needs, and thousands apart.
pub fn figure(value: f64) -> String {
    let text = match value.abs() {
        size if !size.is_finite() => return "?".to_owned(),
        size if size >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.095 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    };
    let digits = text.find('.').unwrap_or(text.len());
    let mut out = String::new();
    for (index, character) in text.chars().enumerate() {
        let left = digits as i64 - index as i64;
        if index > 0 && left > 0 && left % 3 == 0 && !out.ends_with('-') {
            out.push(',');
        }
        out.push(character);
    }
    out
}

/// Round steps for an axis from 0 to `largest`, at most about six of them.
pub fn ticks(largest: f64) -> Vec<f64> {
    if !(largest.is_finite() && largest > 0.0) {
        return vec![0.0, 1.0];
    }
    let rough = largest / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|&step| step >= rough);
    let step = step.unwrap_or(rough);
    (0..=(largest / step).ceil() as u32)
        .map(|index| f64::from(index) * step)
        .collect()
}

impl TimeChart<'_> {
    /// The picture.
    pub fn draw(&self) -> String {
        let ticks = self.value_ticks();
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{} over time\">",
            self.height,
            escape(self.lines.first().map_or("", |line| line.name))
        );
        self.draw_bands(&mut svg);
        self.draw_axes(&mut svg, &ticks);
        for line in self.lines {
            self.draw_line(&mut svg, line, &ticks);
        }
        self.draw_pointers(&mut svg);
        svg + "</svg>"
    }

    fn value_ticks(&self) -> Vec<f64> {
        let values = self
            .lines
            .iter()
            .flat_map(|line| self.seconds.iter().map(line.value));
        match self.scale {
            Scale::Linear => ticks(values.fold(0.0, f64::max)),
            Scale::Logarithmic => {
                let values: Vec<f64> = values.filter(|&value| value > 0.0).collect();
                let low = values
                    .iter()
                    .copied()
                    .fold(f64::INFINITY, f64::min)
                    .clamp(0.01, 1e6)
                    .log10()
                    .floor();
                let high = values
                    .iter()
                    .copied()
                    .fold(0.0, f64::max)
                    .clamp(0.1, 1e7)
                    .log10()
                    .ceil();
                (low as i32..=(high as i32).max(low as i32 + 1))
                    .map(|power| 10_f64.powi(power))
                    .collect()
            }
        }
    }

    fn length_s(&self) -> f64 {
        self.seconds
            .last()
            .map_or(1.0, |second| f64::from(second.t) + 1.0)
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (seconds / self.length_s()).clamp(0.0, 1.0)
    }

    fn y(&self, value: f64, ticks: &[f64]) -> f64 {
        let (low, high) = (
            ticks.first().copied().unwrap_or(0.0),
            ticks.last().copied().unwrap_or(1.0),
        );
        let share = match self.scale {
            Scale::Linear => value / high,
            Scale::Logarithmic => (value / low).log10() / (high / low).log10(),
        };
        self.height - BOTTOM - (self.height - TOP - BOTTOM) * share.clamp(0.0, 1.0)
    }

    fn draw_bands(&self, svg: &mut String) {
        for band in self.bands {
            let (from, to) = (self.x(band.window.from_s), self.x(band.window.to_s));
            let (width, height, label) = (
                (to - from).max(2.0),
                self.height - TOP - BOTTOM,
                escape(&band.label),
            );
            let middle = from + width / 2.0;
            let _ = write!(
                svg,
                "<rect class=\"band\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height:.1}\">\
                 <title>{label}: {:.1} s to {:.1} s</title></rect>\
                 <text class=\"band-label\" x=\"{middle:.1}\" y=\"{:.1}\">{label}</text>",
                band.window.from_s,
                band.window.to_s,
                TOP - 8.0
            );
        }
    }

    fn draw_axes(&self, svg: &mut String, ticks: &[f64]) {
        let (right, bottom) = (WIDTH - RIGHT, self.height - BOTTOM);
        for &tick in ticks {
            let y = self.y(tick, ticks);
            let (label_y, label) = (y + 4.0, figure(tick));
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick end\" x=\"{:.1}\" y=\"{label_y:.1}\">{label}</text>",
                LEFT - 8.0
            );
        }
        let _ = write!(
            svg,
            "<text class=\"tick\" x=\"0\" y=\"12\">{}</text>",
            escape(self.unit)
        );
        for tick in self.time_ticks() {
            let x = self.x(tick);
            let _ = write!(
                svg,
                "<text class=\"tick mid\" x=\"{x:.1}\" y=\"{:.1}\">{tick:.0} s</text>",
                bottom + 18.0
            );
        }
    }

    fn time_ticks(&self) -> Vec<f64> {
        let length = self.length_s();
        let step = [
            1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0,
        ];
        let step = step
            .into_iter()
            .find(|step| length / step <= 12.0)
            .unwrap_or(36000.0);
        (0..=(length / step) as u32)
            .map(|index| f64::from(index) * step)
            .collect()
    }

    /// A line through the middles of the seconds; broken where a logarithm has no value.
    fn draw_line(&self, svg: &mut String, line: &Line, ticks: &[f64]) {
        let mut path = String::new();
        let mut pen_down = false;
        for second in self.seconds {
            let value = (line.value)(second);
            if self.scale == Scale::Logarithmic && value <= 0.0 {
                pen_down = false;
                continue;
            }
            let (x, y) = (self.x(f64::from(second.t) + 0.5), self.y(value, ticks));
            let _ = write!(path, "{}{x:.1} {y:.1}", if pen_down { 'L' } else { 'M' });
            pen_down = true;
        }
        let _ = write!(svg, "<path class=\"line {}\" d=\"{path}\"/>", line.class);
    }

    /// One invisible column a second that shows all values under the pointer.
    fn draw_pointers(&self, svg: &mut String) {
        for second in self.seconds {
            let (from, to) = (
                self.x(f64::from(second.t)),
                self.x(f64::from(second.t) + 1.0),
            );
            let mut title = format!("second {}", second.t);
            for line in self.lines {
                let _ = write!(
                    title,
                    "\n{} {} {}",
                    line.name,
                    figure((line.value)(second)),
                    self.unit
                );
            }
            let _ = write!(
                svg,
                "<rect class=\"pointer\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\"><title>{}</title></rect>",
                to - from,
                self.height - TOP - BOTTOM,
                escape(&title)
            );
        }
    }
}

/// A part of a stacked bar.
pub struct Part {
    /// What it is.
    pub name: String,
    /// How much.
    pub value_ms: f64,
}

/// A stacked bar of milliseconds on an axis up to `longest_ms`, with a mark at the promise.
pub fn stacked_bar(parts: &[Part], longest_ms: f64, promise_ms: Option<f64>) -> String {
    const HEIGHT: f64 = 74.0;
    let axis = ticks(longest_ms);
    let end = axis.last().copied().unwrap_or(1.0);
    let x = |ms: f64| 8.0 + (WIDTH - 24.0) * (ms / end).clamp(0.0, 1.0);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"parts of the switchover\">"
    );
    for &tick in &axis {
        let at = x(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"18\" y2=\"54\"/>\
             <text class=\"tick mid\" x=\"{at:.1}\" y=\"70\">{}</text>",
            figure(tick)
        );
    }
    let mut from = 0.0;
    for (index, part) in parts.iter().enumerate() {
        let (left, right) = (x(from), x(from + part.value_ms));
        // A gap of surface between neighbours tells them apart also without colour.
        let width = (right - left - 2.0).max(0.5);
        let _ = write!(
            svg,
            "<rect class=\"part{}\" x=\"{left:.1}\" y=\"24\" width=\"{width:.1}\" height=\"24\" rx=\"2\"><title>{}: {} ms</title></rect>",
            index % 6,
            escape(&part.name),
            figure(part.value_ms)
        );
        from += part.value_ms;
    }
    if let Some(promise) = promise_ms {
        let at = x(promise);
        let anchor = if at > WIDTH - 160.0 { "end" } else { "start" };
        let text_x = if at > WIDTH - 160.0 {
            at - 6.0
        } else {
            at + 6.0
        };
        let _ = write!(
            svg,
            "<line class=\"promise\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"6\" y2=\"54\"/>\
             <text class=\"tick\" text-anchor=\"{anchor}\" x=\"{text_x:.1}\" y=\"14\">target {} ms</text>",
            figure(promise)
        );
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_grouped() {
        for (value, text) in [
            (0.0, "0"),
            (0.0421, "0.042"),
            (0.5, "0.50"),
            (12.34, "12.3"),
            (12.0, "12"),
            (999.6, "1,000"),
            (1234567.0, "1,234,567"),
            (-1234.0, "-1,234"),
            (f64::NAN, "?"),
        ] {
            assert_eq!(figure(value), text);
        }
    }

    #[test]
    fn ticks_cover_the_largest_value_in_round_steps() {
        assert_eq!(ticks(0.0), [0.0, 1.0]);
        assert_eq!(ticks(97.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        for largest in [0.003, 1.0, 7.3, 580.0, 123456.0] {
            let ticks = ticks(largest);
            assert!(
                ticks.len() <= 7 && *ticks.last().unwrap() >= largest,
                "{largest}: {ticks:?}"
            );
        }
    }

    #[test]
    fn markup_in_names_stays_text() {
        let band = Band {
            window: Window {
                from_s: 0.0,
                to_s: 1.0,
            },
            label: "<script>\"'&".into(),
        };
        let seconds = [Second {
            t: 0,
            ops: 5,
            p50_ms: 0.0,
            p99_ms: 0.0,
            max_ms: 0.0,
        }];
        let lines = [Line {
            name: "ops",
            class: "blue",
            value: |second| second.ops as f64,
        }];
        let bands = [band];
        let chart = TimeChart {
            seconds: &seconds,
            lines: &lines,
            bands: &bands,
            unit: "",
            scale: Scale::Linear,
            height: 200.0,
        };
        assert!(!chart.draw().contains("<script>"));
    }

    #[test]
    fn empty_and_hostile_series_still_draw() {
        let rows = [Second {
            t: 0,
            ops: 0,
            p50_ms: f64::NAN,
            p99_ms: -1.0,
            max_ms: f64::INFINITY,
        }];
        let lines = [
            Line {
                name: "p50",
                class: "blue",
                value: |second| second.p50_ms,
            },
            Line {
                name: "max",
                class: "blue",
                value: |second| second.max_ms,
            },
        ];
        for seconds in [&rows[..], &[]] {
            for scale in [Scale::Linear, Scale::Logarithmic] {
                let chart = TimeChart {
                    seconds,
                    lines: &lines,
                    bands: &[],
                    unit: "ms",
                    scale,
                    height: 200.0,
                };
                assert!(chart.draw().ends_with("</svg>"));
            }
        }
    }
}
