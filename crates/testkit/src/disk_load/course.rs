//! Figures of a load, out of its answers within a span of time.
//!
//! Pure. Times are seconds since the load began. Refuses nothing: what a span does not have is none.

/// A request that was answered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Done {
    pub at_s: f64,
    pub took_ms: f64,
    pub is_write: bool,
}

/// How long requests took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Latency {
    pub count: u64,
    pub mean_ms: f64,
    /// Of one request, in ms squared.
    pub variance: f64,
    pub median_ms: f64,
    pub p99_ms: f64,
    pub longest_ms: f64,
}

impl Latency {
    /// Of some requests; none of none.
    pub fn of(mut took_ms: Vec<f64>) -> Option<Self> {
        took_ms.sort_by(f64::total_cmp);
        let count = took_ms.len();
        let at = |part: f64| took_ms.get((part * count as f64) as usize).copied();
        let longest_ms = *took_ms.last()?;
        let mean_ms = took_ms.iter().sum::<f64>() / count as f64;
        let squares = took_ms.iter().map(|took| (took - mean_ms).powi(2));
        Some(Self {
            count: count as u64,
            mean_ms,
            variance: squares.sum::<f64>() / count as f64,
            median_ms: at(0.5)?,
            p99_ms: at(0.99)?,
            longest_ms,
        })
    }
}

/// A load within a span of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    pub seconds: f64,
    pub reads: u64,
    pub writes: u64,
    /// Requests a second.
    pub iops: f64,
    pub write: Option<Latency>,
    pub read: Option<Latency>,
    /// The longest time in which no request was answered.
    pub stall_ms: f64,
    /// The longest that a request took which was answered in the span.
    pub longest_ms: f64,
}

/// What was answered from one moment to another.
pub fn figures(done: &[Done], from_s: f64, to_s: f64) -> Figures {
    let within = between(done, from_s, to_s);
    let took = |is_write: bool| {
        let of_kind = within.iter().filter(|done| done.is_write == is_write);
        of_kind.map(|done| done.took_ms).collect::<Vec<_>>()
    };
    let (write, read) = (took(true), took(false));
    let seconds = (to_s - from_s).max(0.0);
    let longest = within.iter().map(|done| done.took_ms);
    Figures {
        seconds,
        reads: read.len() as u64,
        writes: write.len() as u64,
        iops: within.len() as f64 / seconds.max(1e-9),
        write: Latency::of(write),
        read: Latency::of(read),
        stall_ms: stall_ms(within, from_s, to_s),
        longest_ms: longest.fold(0.0, f64::max),
    }
}

/// Requests a second in each tenth of a second of a span.
pub fn by_tenths(done: &[Done], from_s: f64, to_s: f64) -> Vec<f64> {
    let tenths = ((to_s - from_s).max(0.0) * 10.0).ceil() as usize;
    let mut counts = vec![0.0; tenths];
    for one in between(done, from_s, to_s) {
        if let Some(count) = counts.get_mut(((one.at_s - from_s) * 10.0) as usize) {
            *count += 10.0;
        }
    }
    counts
}

/// How long writes took on average that were answered in each tenth of a second of a span; none where none was.
pub fn write_ms_by_tenths(done: &[Done], from_s: f64, to_s: f64) -> Vec<Option<f64>> {
    let tenths = ((to_s - from_s).max(0.0) * 10.0).ceil() as usize;
    let mut sums = vec![(0.0, 0_u32); tenths];
    for one in between(done, from_s, to_s)
        .iter()
        .filter(|one| one.is_write)
    {
        if let Some((sum, count)) = sums.get_mut(((one.at_s - from_s) * 10.0) as usize) {
            *sum += one.took_ms;
            *count += 1;
        }
    }
    let means = sums.into_iter();
    let mean = |(sum, count): (f64, u32)| (count > 0).then(|| sum / f64::from(count));
    means.map(mean).collect()
}

/// Answers come in the order of their moments.
fn between(done: &[Done], from_s: f64, to_s: f64) -> &[Done] {
    let first = done.partition_point(|one| one.at_s < from_s);
    let end = done.partition_point(|one| one.at_s < to_s);
    done.get(first..end).unwrap_or_default()
}

fn stall_ms(within: &[Done], from_s: f64, to_s: f64) -> f64 {
    let moments = within.iter().map(|done| done.at_s).chain([to_s]);
    let mut last = from_s;
    let mut longest = 0.0_f64;
    for at_s in moments {
        longest = longest.max(at_s - last);
        last = at_s;
    }
    longest * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(at_s: f64, took_ms: f64, is_write: bool) -> Done {
        Done {
            at_s,
            took_ms,
            is_write,
        }
    }

    #[test]
    fn figures_are_those_of_the_span_alone() {
        let all = [
            done(0.5, 900.0, true),
            done(1.0, 1.0, true),
            done(1.1, 2.0, false),
            done(1.5, 3.0, true),
            done(2.0, 900.0, true),
        ];
        let figures = figures(&all, 1.0, 2.0);
        assert_eq!((figures.reads, figures.writes), (1, 2));
        assert_eq!(figures.iops, 3.0);
        let write = figures.write.unwrap();
        assert_eq!((write.mean_ms, write.variance), (2.0, 1.0));
        assert_eq!((write.longest_ms, figures.longest_ms), (3.0, 3.0));
        assert!((figures.stall_ms - 500.0).abs() < 1e-6, "{figures:?}");
        assert_eq!(by_tenths(&all, 1.0, 1.2), [10.0, 10.0]);
        assert_eq!(write_ms_by_tenths(&all, 1.0, 1.2), [Some(1.0), None]);
    }

    #[test]
    fn a_span_without_an_answer_is_one_stall() {
        let figures = figures(&[done(9.0, 1.0, false)], 1.0, 3.0);
        assert_eq!((figures.iops, figures.stall_ms), (0.0, 2000.0));
        assert_eq!((figures.write, figures.read), (None, None));
    }
}
