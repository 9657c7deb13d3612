//! What the pages of the demo and of the bench are written with: one writer of HTML, one of SVG, one style sheet.
//!
//! A page needs nothing else: no script, no font, no picture from elsewhere. Text that comes in is escaped here, so that none
//! of it is markup. Refuses nothing; a number that is none is a question mark.

pub mod html;
pub mod svg;

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
}
