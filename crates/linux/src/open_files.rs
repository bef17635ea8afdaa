//! The limit of open files of this process.

/// Raises the limit to `wanted`. Without the permission for that, raises it as far as the hard limit. Returns the limit that
/// holds then.
pub fn raise(wanted: u64) -> u64 {
    let Some(before) = limit() else {
        return 0;
    };
    if before.rlim_cur >= wanted {
        return before.rlim_cur;
    }
    let raised = libc::rlimit {
        rlim_cur: wanted,
        rlim_max: before.rlim_max.max(wanted),
    };
    let hard = libc::rlimit {
        rlim_cur: before.rlim_max.min(wanted),
        ..before
    };
    // If both fail, the present limit holds.
    let _ = set(&raised) || set(&hard);
    limit().map_or(0, |limit| limit.rlim_cur)
}

fn limit() -> Option<libc::rlimit> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call gets a valid structure that outlives it.
    let read = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    (read == 0).then_some(limit)
}

fn set(limit: &libc::rlimit) -> bool {
    // SAFETY: the call gets a valid structure that outlives it.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const *limit) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_permitted() {
        let hard = limit().unwrap().rlim_max;
        // More than any process may open.
        assert_eq!(raise(u64::MAX), hard);
        assert_eq!(raise(1), hard, "it is never lowered");
    }
}
