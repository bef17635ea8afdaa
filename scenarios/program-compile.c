/* The input of program-compile.toml: 3000 functions, which the preprocessor generates. */
extern int next(int, int);
#define FUNCTION(n) \
    int f##n(int *a, int count) { \
        int sum = n; \
        for (int i = 0; i < count; i++) \
            sum += a[i] * (i ^ n) + next(sum, i); \
        return sum; \
    }
#define TIMES_TEN(what, n) \
    what(n##0) what(n##1) what(n##2) what(n##3) what(n##4) \
    what(n##5) what(n##6) what(n##7) what(n##8) what(n##9)
#define TEN(n) TIMES_TEN(FUNCTION, n)
#define HUNDRED(n) \
    TEN(n##0) TEN(n##1) TEN(n##2) TEN(n##3) TEN(n##4) TEN(n##5) TEN(n##6) TEN(n##7) TEN(n##8) TEN(n##9)
#define THOUSAND(n) \
    HUNDRED(n##0) HUNDRED(n##1) HUNDRED(n##2) HUNDRED(n##3) HUNDRED(n##4) \
    HUNDRED(n##5) HUNDRED(n##6) HUNDRED(n##7) HUNDRED(n##8) HUNDRED(n##9)
THOUSAND(1)
THOUSAND(2)
THOUSAND(3)
