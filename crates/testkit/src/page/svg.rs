//! SVG pictures, in a page or alone.
//!
//! Colours are classes that a style sheet defines, so that one picture serves light and dark. A mark's figures are its title,
//! which browsers show under the pointer. Owns the text that it writes.

use super::escape;
use std::fmt::Write as _;

pub struct Svg(String);

impl Svg {
    /// In a page, whose style sheet it uses.
    pub fn new(width: f64, height: f64, label: &str) -> Self {
        let label = escape(label);
        Self(format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label}\">"
        ))
    }

    /// As a file of its own, with a style sheet of its own.
    pub fn document(width: f64, height: f64, title: &str, style: &str) -> Self {
        let title = escape(title);
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height}\" width=\"{width:.0}\" role=\"img\">\
             <title>{title}</title><style>{style}</style>"
        ))
    }

    pub fn text(&mut self, class: &str, (x, y): (f64, f64), text: &str) {
        let text = escape(text);
        let _ = write!(
            self.0,
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>"
        );
    }

    pub fn rule(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let (x, y) = (
            format!("x1=\"{x1:.1}\" x2=\"{x2:.1}\""),
            format!("y1=\"{y1:.1}\" y2=\"{y2:.1}\""),
        );
        let _ = write!(self.0, "<line class=\"{class}\" {x} {y}/>");
    }

    pub fn rect(
        &mut self,
        class: &str,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        title: &str,
    ) {
        let (title, size) = (
            escape(title),
            format!("width=\"{width:.1}\" height=\"{height:.1}\""),
        );
        let _ = write!(
            self.0,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" {size}><title>{title}</title></rect>"
        );
    }

    pub fn path(&mut self, class: &str, data: &str) {
        let _ = write!(self.0, "<path class=\"{class}\" d=\"{data}\"/>");
    }

    pub fn end(self) -> String {
        self.0 + "</svg>"
    }
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
