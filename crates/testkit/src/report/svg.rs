//! The report's pictures: values over the seconds of a run, and the parts of a pause.
//!
//! Pure: out of the figures given. Refuses nothing; values that are none are drawn at the edge.

use crate::load::series::{Second, Window};
use crate::page::figure;
use crate::page::svg::{Svg, ticks};
use std::fmt::Write as _;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 26.0;

/// A migration's place in a chart over time.
pub struct Band {
    pub window: Window,
    pub label: String,
}

pub struct Line {
    pub name: &'static str,
    pub class: &'static str,
    /// Its value in a second.
    pub value: fn(&Second) -> f64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Linear,
    /// Powers of ten; seconds without a value leave a gap.
    Logarithmic,
}

/// A chart over the seconds of the run.
pub struct TimeChart<'a> {
    pub seconds: &'a [Second],
    pub lines: &'a [Line],
    pub bands: &'a [Band],
    pub unit: &'static str,
    pub scale: Scale,
    pub height: f64,
}

impl TimeChart<'_> {
    pub fn draw(&self) -> String {
        let ticks = self.value_ticks();
        let first = self.lines.first().map_or("", |line| line.name);
        let mut svg = Svg::new(WIDTH, self.height, &format!("{first} over time"));
        self.draw_bands(&mut svg);
        self.draw_axes(&mut svg, &ticks);
        for line in self.lines {
            self.draw_line(&mut svg, line, &ticks);
        }
        self.draw_pointers(&mut svg);
        svg.end()
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

    fn draw_bands(&self, svg: &mut Svg) {
        for band in self.bands {
            let Window { from_s, to_s } = band.window;
            let (from, to) = (self.x(from_s), self.x(to_s));
            let size = ((to - from).max(2.0), self.height - TOP - BOTTOM);
            let title = format!("{}: {from_s:.1} s to {to_s:.1} s", band.label);
            svg.rect("band", (from, TOP), size, &title);
            svg.text("band-label", (from + size.0 / 2.0, TOP - 8.0), &band.label);
        }
    }

    fn draw_axes(&self, svg: &mut Svg, ticks: &[f64]) {
        for &tick in ticks {
            let y = self.y(tick, ticks);
            svg.rule("grid", (LEFT, y), (WIDTH - RIGHT, y));
            svg.text("tick end", (LEFT - 8.0, y + 4.0), &figure(tick));
        }
        svg.text("tick", (0.0, 12.0), self.unit);
        for tick in self.time_ticks() {
            let at = (self.x(tick), self.height - BOTTOM + 18.0);
            svg.text("tick mid", at, &format!("{tick:.0} s"));
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
    fn draw_line(&self, svg: &mut Svg, line: &Line, ticks: &[f64]) {
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
        svg.path(&format!("line {}", line.class), &path);
    }

    /// One invisible column a second that shows all values under the pointer.
    fn draw_pointers(&self, svg: &mut Svg) {
        for second in self.seconds {
            let mut title = format!("second {}", second.t);
            for line in self.lines {
                let value = figure((line.value)(second));
                let _ = write!(title, "\n{} {value} {}", line.name, self.unit);
            }
            let at = f64::from(second.t);
            let (from, to) = (self.x(at), self.x(at + 1.0));
            let size = (to - from, self.height - TOP - BOTTOM);
            svg.rect("pointer", (from, TOP), size, &title);
        }
    }
}

/// A part of a stacked bar.
pub struct Part {
    pub name: String,
    pub value_ms: f64,
}

/// A stacked bar of milliseconds on an axis up to `longest_ms`, with a mark at the promise.
pub fn stacked_bar(parts: &[Part], longest_ms: f64, promise_ms: Option<f64>) -> String {
    const HEIGHT: f64 = 74.0;
    let axis = ticks(longest_ms);
    let end = axis.last().copied().unwrap_or(1.0);
    let x = |ms: f64| 8.0 + (WIDTH - 24.0) * (ms / end).clamp(0.0, 1.0);
    let mut svg = Svg::new(WIDTH, HEIGHT, "parts of the switchover");
    for &tick in &axis {
        svg.rule("grid", (x(tick), 18.0), (x(tick), 54.0));
        svg.text("tick mid", (x(tick), 70.0), &figure(tick));
    }
    let mut from = 0.0;
    for (index, part) in parts.iter().enumerate() {
        let (left, right) = (x(from), x(from + part.value_ms));
        // A gap of surface between neighbours tells them apart also without colour.
        let size = ((right - left - 2.0).max(0.5), 24.0);
        let title = format!("{}: {} ms", part.name, figure(part.value_ms));
        svg.rect(&format!("part{}", index % 6), (left, 24.0), size, &title);
        from += part.value_ms;
    }
    if let Some(promise) = promise_ms {
        let at = x(promise);
        let late = at > WIDTH - 160.0;
        let (class, text_x) = if late {
            ("tick end", at - 6.0)
        } else {
            ("tick", at + 6.0)
        };
        svg.rule("promise", (at, 6.0), (at, 54.0));
        svg.text(
            class,
            (text_x, 14.0),
            &format!("target {} ms", figure(promise)),
        );
    }
    svg.end()
}

#[cfg(test)]
mod tests {
    use super::*;

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
