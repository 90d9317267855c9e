//! What chat templates expect from Python: `json.dumps`, `strftime`, and how values print.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::Formatter;

/// `tojson` as transformers defines it: `json.dumps(x, ensure_ascii=False, ..)`, without HTML escapes.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let indent = options.get::<Option<usize>>("indent")?;
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let bad = |e: &dyn std::fmt::Display| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}"));

    let (item, key) = match separators.as_deref() {
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(bad(&"`separators` needs two strings")),
    };
    let mut json = serde_json::to_value(value).map_err(|e| bad(&e))?;
    if sort_keys {
        json.sort_all_objects();
    }
    let format = PythonJson {
        item,
        key,
        indent,
        level: 0,
        filled: false,
    };
    let mut out = Vec::new();
    json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, format))
        .map_err(|e| bad(&e))?;
    let text = String::from_utf8(out).map_err(|e| bad(&e))?;
    Ok(Value::from(if ensure_ascii { escape_non_ascii(&text) } else { text }))
}

fn escape_non_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}

/// Separators and indentation of Python's `json.dumps`.
struct PythonJson {
    item: String,
    key: String,
    indent: Option<usize>,
    level: usize,
    /// Whether the innermost container has an element.
    filled: bool,
}

impl PythonJson {
    fn newline<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(writer, "\n{}", " ".repeat(width * self.level)),
            None => Ok(()),
        }
    }

    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.filled = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if self.filled {
            self.newline(writer)?;
        }
        writer.write_all(bracket)
    }

    fn element<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.newline(writer)
    }
}

impl Formatter for PythonJson {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }
    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.element(writer, first)
    }
    fn end_array_value<W: ?Sized + Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }
    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }
    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.element(writer, first)
    }
    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
    fn end_object_value<W: ?Sized + Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
}

/// How `{{ value }}` prints where Jinja2 and minijinja differ; None: they agree.
pub(super) fn print_like_python(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Seq | ValueKind::Map => Some(repr(value)),
        _ => None,
    }
}

/// Python's `repr` of JSON-like values.
fn repr(value: &Value) -> String {
    let items = |value: &Value| value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool if value.is_true() => "True".into(),
        ValueKind::Bool => "False".into(),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default()),
        ValueKind::Seq => format!("[{}]", items(value).map(|v| repr(&v)).collect::<Vec<_>>().join(", ")),
        ValueKind::Map => {
            let entry = |key: Value| format!("{}: {}", repr(&key), repr(&value.get_item(&key).unwrap_or_default()));
            format!("{{{}}}", items(value).map(entry).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

fn repr_str(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote || c == '\\' => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || (0x7f..0xa0).contains(&(c as u32)) => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// `strftime` in UTC and the C locale for seconds since 1970; Err names the first directive it does not know.
pub(super) fn strftime(format: &str, unix_seconds: u64) -> Result<String, String> {
    let (days, second) = ((unix_seconds / 86_400) as i64, unix_seconds % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (year, month, day) = civil_date(days);
    let year_day = days - days_since_1970(year, 1, 1) + 1;
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('j') => out.push_str(&format!("{year_day:03}")),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{hour12:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('%') => out.push('%'),
            other => return Err(format!("%{}", other.map(String::from).unwrap_or_default())),
        }
    }
    Ok(out)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    // Years start in March, so that the leap day is the last day of its year.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    365 * y + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) + (153 * m + 2) / 5 + day - 1 - 719_468
}

/// Year, month and day of a day number.
fn civil_date(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days / 366;
    while days_since_1970(year + 1, 1, 1) <= days {
        year += 1;
    }
    let month = (1..=12).rev().find(|&m| days_since_1970(year, m, 1) <= days).unwrap_or(1);
    (year, month, days - days_since_1970(year, month, 1) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected strings come from Python's datetime.
    #[test]
    fn dates_print_as_in_python() {
        let format = "%d %b %Y|%A %a|%B|%H:%M:%S|%I %p|%j|%y|%F %T|%%";
        let cases = [
            (0, "01 Jan 1970|Thursday Thu|January|00:00:00|12 AM|001|70|1970-01-01 00:00:00|%"),
            (
                951_782_400,
                "29 Feb 2000|Tuesday Tue|February|00:00:00|12 AM|060|00|2000-02-29 00:00:00|%",
            ),
            (
                1_735_689_599,
                "31 Dec 2024|Tuesday Tue|December|23:59:59|11 PM|366|24|2024-12-31 23:59:59|%",
            ),
        ];
        for (seconds, expected) in cases {
            assert_eq!(strftime(format, seconds).unwrap(), expected);
        }
        assert_eq!(strftime("%Q", 0).unwrap_err(), "%Q");
    }
}
