//! Figures for people: three significant digits and the unit that suits the size.

/// Units of a duration and what one of them is in microseconds, smallest first.
const DURATION_UNITS: [(&str, f64); 4] = [("ns", 1e-3), ("µs", 1.0), ("ms", 1e3), ("s", 1e6)];

/// Units of a size, each 1024 times the one before it.
const SIZE_UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// A duration given in microseconds: `870 ns`, `12.3 µs`, `4.56 ms`, `1.23 s`, `5,149 s`.
///
/// Nanoseconds are whole, because the kernel's clock tells no less.
#[must_use]
pub fn duration(micros: f64) -> String {
    let last = DURATION_UNITS.len() - 1;
    for (index, (unit, factor)) in DURATION_UNITS.into_iter().enumerate() {
        let value = micros / factor;
        if index == last || round_to_three(value) < 1_000.0 {
            let digits = if index == 0 { format!("{value:.0}") } else { significant(value) };
            return format!("{digits} {unit}");
        }
    }
    unreachable!("the last unit takes every value")
}

/// A size in bytes: `512 B`, `8.00 KiB`, `640 MiB`.
#[must_use]
pub fn size(bytes: u64) -> String {
    if bytes < 1_024 {
        return format!("{} B", count(bytes));
    }
    let mut value = bytes as f64 / 1_024.0;
    let mut unit = 0;
    // A size that would be rounded up to 1024 of a unit is one of the next.
    while value.round() >= 1_024.0 && unit + 1 < SIZE_UNITS.len() {
        value /= 1_024.0;
        unit += 1;
    }
    format!("{} {}", significant(value), SIZE_UNITS[unit])
}

/// A count with thousands separators, as perf writes them: `81,968`.
#[must_use]
pub fn count(number: u64) -> String {
    group_thousands(&number.to_string())
}

/// A ratio in percent: `98.2 %`.
///
/// Only a ratio of exactly one is `100 %` and only exactly zero is `0 %`: a rounded figure must not claim
/// that all is well, or that nothing is there.
#[must_use]
pub fn ratio(ratio: f64) -> String {
    let percent = ratio * 100.0;
    if percent <= 0.0 {
        "0 %".to_owned()
    } else if percent < 0.1 {
        "<0.1 %".to_owned()
    } else if (99.9..100.0).contains(&percent) {
        ">99.9 %".to_owned()
    } else if percent < 99.95 {
        format!("{percent:.1} %")
    } else {
        format!("{percent:.0} %")
    }
}

/// A ratio in whole percent, where there is little room: `71 %`.
///
/// As with [`ratio`], only exactly one is `100 %` and only exactly zero is `0 %`.
#[must_use]
pub fn percent(ratio: f64) -> String {
    let percent = ratio * 100.0;
    // `format!` rounds half to even, and would make nothing of a half.
    if percent <= 0.0 {
        "0 %".to_owned()
    } else if percent < 0.5 {
        "<1 %".to_owned()
    } else if (99.5..100.0).contains(&percent) {
        ">99 %".to_owned()
    } else {
        format!("{:.0} %", percent.round())
    }
}

/// `part` of `whole` in percent; `None` when there is no whole.
#[must_use]
pub fn share(part: u64, whole: u64) -> Option<String> {
    (whole > 0).then(|| ratio(part as f64 / whole as f64))
}

/// A number of things: `1 read`, `5,149 reads`.
#[must_use]
pub fn counted(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", count(number))
}

/// `value` with three significant digits, the integer part never shortened.
fn significant(value: f64) -> String {
    let rounded = round_to_three(value);
    if rounded < 10.0 {
        format!("{value:.2}")
    } else if rounded < 100.0 {
        format!("{value:.1}")
    } else {
        group_thousands(&format!("{value:.0}"))
    }
}

/// What `value` is once it is rounded to three significant digits (to an integer from 100 on).
fn round_to_three(value: f64) -> f64 {
    let scale = if value < 9.995 {
        100.0
    } else if value < 99.95 {
        10.0
    } else {
        1.0
    };
    (value * scale).round() / scale
}

/// Puts a comma before each group of three digits.
fn group_thousands(digits: &str) -> String {
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_three_significant_digits() {
        let cases = [
            (0.0, "0 ns"),
            (0.087, "87 ns"),
            (0.87, "870 ns"),
            (0.9996, "1.00 µs"),
            (1.0, "1.00 µs"),
            (9.994, "9.99 µs"),
            (9.996, "10.0 µs"),
            (12.34, "12.3 µs"),
            (99.96, "100 µs"),
            (999.4, "999 µs"),
            (999.6, "1.00 ms"),
            (4_560.0, "4.56 ms"),
            (1_230_000.0, "1.23 s"),
            (3.6e9, "3,600 s"),
            (5_149.4e6, "5,149 s"),
        ];
        for (micros, expected) in cases {
            assert_eq!(duration(micros), expected, "{micros} µs");
        }
    }

    #[test]
    fn sizes_are_binary() {
        let cases = [
            (0, "0 B"),
            (1_023, "1,023 B"),
            (1_024, "1.00 KiB"),
            (8_192, "8.00 KiB"),
            (131_072, "128 KiB"),
            (1_023 * 1_024, "1,023 KiB"),
            (1_048_570, "1.00 MiB"),
            (640 << 20, "640 MiB"),
            (3 << 29, "1.50 GiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(size(bytes), expected, "{bytes} bytes");
        }
    }

    #[test]
    fn counts_have_thousands_separators() {
        let cases = [(0, "0"), (999, "999"), (1_000, "1,000"), (81_968, "81,968"), (1_234_567, "1,234,567")];
        for (number, expected) in cases {
            assert_eq!(count(number), expected);
        }
        assert_eq!(counted(1, "read"), "1 read");
        assert_eq!(counted(5_149, "read"), "5,149 reads");
    }

    #[test]
    fn ratios_are_not_rounded_to_all_or_nothing() {
        let cases = [
            (0.0, "0 %"),
            (0.000_1, "<0.1 %"),
            (0.05, "5.0 %"),
            (0.982, "98.2 %"),
            (0.999_96, ">99.9 %"),
            (1.0, "100 %"),
            (1.234, "123 %"),
        ];
        for (value, expected) in cases {
            assert_eq!(ratio(value), expected, "{value}");
        }
        let cases = [
            (0.0, "0 %"),
            (0.001, "<1 %"),
            (0.005, "1 %"),
            (0.714, "71 %"),
            (0.996, ">99 %"),
            (1.0, "100 %"),
        ];
        for (value, expected) in cases {
            assert_eq!(percent(value), expected, "{value}");
        }
        assert_eq!(share(1, 4).as_deref(), Some("25.0 %"));
        assert_eq!(share(0, 0), None);
    }
}
