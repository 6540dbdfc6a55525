//! The `CNI_*` variables, checked before anything else happens.

use crate::error::CniError;

/// What the runtime asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Attach.
    Add,
    /// Compare.
    Check,
    /// Detach.
    Del,
    /// Can ADD be served?
    Status,
    /// Remove what no listed attachment owns.
    Gc,
    /// Which versions?
    Version,
}

impl Verb {
    /// The value of `CNI_COMMAND`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
            Self::Status => "STATUS",
            Self::Gc => "GC",
            Self::Version => "VERSION",
        }
    }

    /// Reads `CNI_COMMAND`.
    ///
    /// # Errors
    /// Code 4 when it is missing or unknown.
    pub fn from_environment(env: &dyn Lookup) -> Result<Self, CniError> {
        let text = env.var("CNI_COMMAND").unwrap_or_default();
        [Self::Add, Self::Check, Self::Del, Self::Status, Self::Gc, Self::Version]
            .into_iter()
            .find(|v| v.as_str() == text)
            .ok_or_else(|| {
                CniError::environment(
                    "CNI_COMMAND",
                    format_args!("{text:?} is none of ADD, CHECK, DEL, STATUS, GC, VERSION"),
                )
            })
    }
}

/// Where variables come from: the process, or a test's list.
pub trait Lookup {
    /// The variable's value; `None` when it is not set.
    fn var(&self, name: &str) -> Option<String>;
}

/// The process's own environment.
#[derive(Debug, Clone, Copy)]
pub struct ProcessEnvironment;

impl Lookup for ProcessEnvironment {
    fn var(&self, name: &str) -> Option<String> {
        // A value that is not UTF-8 is no valid value of any variable read here; its lossy form fails the check and is shown.
        std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
    }
}

impl Lookup for std::collections::BTreeMap<&str, String> {
    fn var(&self, name: &str) -> Option<String> {
        self.get(name).cloned()
    }
}

/// The variables of one attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_NETNS`; `None` only for DEL, where the namespace may be gone.
    pub netns: Option<String>,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `CNI_ARGS`.
    pub args: Args,
}

impl Attachment {
    /// Reads and checks the variables that `verb` needs.
    ///
    /// # Errors
    /// Code 4 naming the variable.
    pub fn from_environment(env: &dyn Lookup, verb: Verb) -> Result<Self, CniError> {
        let container_id = required(env, "CNI_CONTAINERID")?;
        if !is_identifier(&container_id) {
            return Err(CniError::environment(
                "CNI_CONTAINERID",
                format_args!(
                    "{container_id:?} must start with a letter or digit and hold only letters, digits, '_', '.', '-'"
                ),
            ));
        }
        let ifname = required(env, "CNI_IFNAME")?;
        check_ifname(&ifname)?;
        let netns = env.var("CNI_NETNS").filter(|p| !p.is_empty());
        if verb != Verb::Del {
            match &netns {
                None => return Err(CniError::environment("CNI_NETNS", "is required")),
                Some(path) if !path.starts_with('/') => {
                    return Err(CniError::environment(
                        "CNI_NETNS",
                        format_args!("{path:?} is not an absolute path"),
                    ));
                }
                Some(path) if !std::path::Path::new(path).exists() => {
                    return Err(CniError::environment("CNI_NETNS", format_args!("{path:?} does not exist")));
                }
                Some(_) => {}
            }
        }
        let text = env.var("CNI_ARGS").unwrap_or_default();
        // A mistake in the arguments must not keep a container from being removed.
        let args = match Args::parse(&text) {
            Err(_) if verb == Verb::Del => Args::default(),
            other => other?,
        };
        Ok(Self { container_id, netns, ifname, args })
    }
}

fn required(env: &dyn Lookup, name: &str) -> Result<String, CniError> {
    env.var(name).filter(|v| !v.is_empty()).ok_or_else(|| CniError::environment(name, "is required"))
}

/// Syntax of container ids and network names (CNI 1.1.0, sections 1 and 2).
pub(crate) fn is_identifier(s: &str) -> bool {
    s.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && s.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

fn check_ifname(name: &str) -> Result<(), CniError> {
    let problem = if name.len() > 15 {
        "is longer than 15 bytes"
    } else if name == "." || name == ".." {
        "is not a name"
    } else if name.bytes().any(|b| b == b'/' || b == b':' || b.is_ascii_whitespace() || b.is_ascii_control())
    {
        "holds a '/', a ':', a space or a control character"
    } else {
        return Ok(());
    };
    Err(CniError::environment("CNI_IFNAME", format_args!("{name:?} {problem}")))
}

/// `CNI_ARGS`: `key=value` pairs separated by `;`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Args {
    /// `FLOWLOOM_ENDPOINT`: the document's endpoint to bind.
    pub endpoint: Option<String>,
    /// `K8S_POD_NAMESPACE`.
    pub pod_namespace: Option<String>,
    /// `K8S_POD_NAME`.
    pub pod_name: Option<String>,
    /// `K8S_POD_UID`.
    pub pod_uid: Option<String>,
}

impl Args {
    /// Parses the variable. Unknown keys are refused unless `IgnoreUnknown` says otherwise, as runtimes expect.
    ///
    /// # Errors
    /// Code 4 naming `CNI_ARGS` and the pair.
    pub fn parse(text: &str) -> Result<Self, CniError> {
        let mut args = Self::default();
        let mut unknown = None;
        let mut ignore_unknown = false;
        for pair in text.split(';').filter(|p| !p.is_empty()) {
            let Some((key, value)) = pair.split_once('=').filter(|(k, _)| !k.is_empty()) else {
                return Err(CniError::environment("CNI_ARGS", format_args!("{pair:?} is not key=value")));
            };
            let slot = match key {
                "FLOWLOOM_ENDPOINT" => &mut args.endpoint,
                "K8S_POD_NAMESPACE" => &mut args.pod_namespace,
                "K8S_POD_NAME" => &mut args.pod_name,
                "K8S_POD_UID" => &mut args.pod_uid,
                "K8S_POD_INFRA_CONTAINER_ID" => continue,
                "IgnoreUnknown" => {
                    ignore_unknown = match value {
                        "1" | "true" | "True" | "TRUE" => true,
                        "0" | "false" | "False" | "FALSE" | "" => false,
                        _ => {
                            return Err(CniError::environment(
                                "CNI_ARGS",
                                format_args!("IgnoreUnknown={value:?} is neither true nor false"),
                            ));
                        }
                    };
                    continue;
                }
                _ => {
                    unknown = unknown.or(Some(pair));
                    continue;
                }
            };
            if slot.is_some() {
                return Err(CniError::environment("CNI_ARGS", format_args!("{key} is given twice")));
            }
            // Kubernetes runtimes pass empty values for what they do not know.
            *slot = Some(value.to_owned()).filter(|v| !v.is_empty());
        }
        match unknown {
            Some(pair) if !ignore_unknown => Err(CniError::environment(
                "CNI_ARGS",
                format_args!("{pair:?} is not known here; IgnoreUnknown=1 passes it over"),
            )),
            _ => Ok(args),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::code;
    use std::collections::BTreeMap;

    fn env(pairs: &[(&'static str, &str)]) -> BTreeMap<&'static str, String> {
        let mut map = BTreeMap::from([
            ("CNI_CONTAINERID", "c1".to_owned()),
            ("CNI_NETNS", "/proc/self/ns/net".to_owned()),
            ("CNI_IFNAME", "eth0".to_owned()),
        ]);
        for (k, v) in pairs {
            map.insert(*k, (*v).to_owned());
        }
        map
    }

    fn fails(verb: Verb, pairs: &[(&'static str, &str)], needle: &str) {
        let e = Attachment::from_environment(&env(pairs), verb).unwrap_err();
        assert_eq!(e.code, code::INVALID_ENVIRONMENT);
        assert!(e.message.contains(needle), "{} lacks {needle:?}", e.message);
    }

    #[test]
    fn wrong_variables_are_named() {
        fails(Verb::Add, &[("CNI_CONTAINERID", "")], "CNI_CONTAINERID");
        fails(Verb::Add, &[("CNI_CONTAINERID", "-x")], "CNI_CONTAINERID");
        fails(Verb::Del, &[("CNI_CONTAINERID", "a/b")], "CNI_CONTAINERID");
        fails(Verb::Add, &[("CNI_NETNS", "")], "CNI_NETNS");
        fails(Verb::Add, &[("CNI_NETNS", "run/x")], "absolute");
        fails(Verb::Add, &[("CNI_NETNS", "/nowhere/at/all")], "does not exist");
        fails(Verb::Check, &[("CNI_NETNS", "/nowhere/at/all")], "does not exist");
        for bad in ["", ".", "..", "a/b", "a:b", "a b", "a\tb", "sixteen-bytes-xx"] {
            fails(Verb::Add, &[("CNI_IFNAME", bad)], "CNI_IFNAME");
        }
        assert!(Attachment::from_environment(&env(&[("CNI_IFNAME", "fifteen-bytes-x")]), Verb::Add).is_ok());
    }

    #[test]
    fn del_takes_an_empty_or_vanished_namespace() {
        for netns in ["", "/nowhere/at/all"] {
            let a = Attachment::from_environment(&env(&[("CNI_NETNS", netns)]), Verb::Del).unwrap();
            assert_eq!(a.netns.as_deref(), Some(netns).filter(|n| !n.is_empty()));
        }
    }

    #[test]
    fn commands() {
        for v in ["ADD", "CHECK", "DEL", "STATUS", "GC", "VERSION"] {
            assert_eq!(Verb::from_environment(&env(&[("CNI_COMMAND", v)])).unwrap().as_str(), v);
        }
        for bad in ["", "add", "ADD ", "REMOVE"] {
            let e = Verb::from_environment(&env(&[("CNI_COMMAND", bad)])).unwrap_err();
            assert_eq!((e.code, e.message.starts_with("CNI_COMMAND: ")), (4, true));
        }
    }

    #[test]
    fn arguments() {
        let a = Args::parse(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=;X=1;FLOWLOOM_ENDPOINT=w",
        )
        .unwrap();
        assert_eq!(
            a,
            Args {
                endpoint: Some("w".into()),
                pod_namespace: Some("shop".into()),
                pod_name: Some("web-0".into()),
                pod_uid: None,
            }
        );
        assert_eq!(Args::parse("").unwrap(), Args::default());
        for bad in
            ["x", "=1", "X=1", "IgnoreUnknown=0;X=1", "IgnoreUnknown=maybe", "K8S_POD_NAME=a;K8S_POD_NAME=b"]
        {
            assert_eq!(Args::parse(bad).unwrap_err().code, code::INVALID_ENVIRONMENT, "{bad}");
        }
    }

    #[test]
    fn del_is_not_stopped_by_bad_arguments() {
        let a = Attachment::from_environment(&env(&[("CNI_ARGS", "nonsense")]), Verb::Del).unwrap();
        assert_eq!(a.args, Args::default());
    }
}
